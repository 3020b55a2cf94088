"""The SAC engine in one process, on device files of its own: for looking inside, and for mutants."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

import emu
from emu.locality.recorded import Recorder
from emu.sac.attach import Delivery
from emu.sac.context import DecodeContext
from emu.sac.designs import DESIGNS
from emu.sac.instance import Decoded, DecodeInstance
from emu.sac.model import DsaModel
from emu.sac.oracle import OracleResult, run_oracle
from emu.sac.plan import RequestPlan, RunSpec, place
from emu.sac.prefill import PrefillInstance
from emu.timing.clock import make_clock
from emu.timing.system import System
from emu.trace.request import Request

if TYPE_CHECKING:
    from pathlib import Path

    from emu.store import KVStore
    from emu.timing.clock import Clock


def requests(*lengths: tuple[int, int], shared: int = 0) -> list[Request]:
    """Requests of (input, output) tokens; the first `shared` 512-token blocks are the same in all."""
    made = []
    for number, (input_tokens, output_tokens) in enumerate(lengths):
        blocks = -(-input_tokens // 512)
        ids = tuple(range(min(shared, blocks))) + tuple(
            1000 * (number + 1) + i for i in range(shared, blocks)
        )
        made.append(Request(f"r{number}", 0.0, input_tokens, output_tokens, ids))
    return made


@dataclass
class Engine:
    """A model, a pool of device files, and what one design made of the requests."""

    spec: RunSpec
    plans: list[RequestPlan]
    model: DsaModel
    pools: list[KVStore]
    clock: Clock | None = None
    deliveries: list[Delivery] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)

    @classmethod
    def make(
        cls,
        directory: Path,
        spec: RunSpec,
        trace: list[Request],
        *,
        pools: int | None = None,
        device_bytes: int = 32 << 20,
    ) -> Engine:
        """With one pool for all devices, as rdma and dram have it, or (None) one for each."""
        model = DsaModel(spec.config(), spec.kv_dtype, spec.seed)
        opened = []
        for number in range(pools or spec.devices):
            path = directory / f"cxl{number}"
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, device_bytes)
            opened.append(emu.open_store(f"cxl://{path}", model.layout))
        return cls(spec, place(trace, spec, "test"), model, opened)

    def store(self, plan: RequestPlan) -> KVStore:
        return self.pools[plan.device if len(self.pools) > 1 else 0]

    def prefill(self) -> None:
        instance = PrefillInstance(self.model, self.spec)
        for plan in self.plans:
            done = instance.run(plan, self.store(plan))
            self.deliveries.append(
                Delivery(plan, done.descriptor, plan.prompt_rows - done.shared_tokens)
            )

    def decode(self, design: str = "cxl") -> Decoded:
        self.recorder = Recorder()
        system = System.load(self.spec.profile, gpus=self.spec.gpus, devices=self.spec.devices)
        self.clock = make_clock(system, self.spec.time, self.spec.dilation)
        local = None
        if DESIGNS[design].prefetch_path:
            options = emu.StoreOptions(capacity_bytes=64 << 20)
            local = emu.open_store("dram://", self.model.layout, options)
        context = DecodeContext(
            self.model,
            self.spec,
            DESIGNS[design],
            self.pools,
            local,
            self.clock,
            system,
            lambda: None,
            self.recorder.observe,
        )
        instance = DecodeInstance(context)
        decoded = instance.run(self.deliveries)
        instance.release()
        if local is not None:
            local.close()
        return decoded

    def oracle(self, plan: RequestPlan) -> OracleResult:
        return run_oracle(
            self.model, torch.from_numpy(plan.prompt(self.spec).copy()), plan.request.output_tokens
        )

    def differences(self, decoded: Decoded) -> list[str]:
        """Where tokens or pool rows differ from the in-memory run; nothing where they do not."""
        found = []
        by_number = {record.number: record for record in decoded.records}
        for plan in self.plans:
            expected = self.oracle(plan)
            if by_number[plan.number].tokens != list(expected.tokens):
                found.append(f"tokens of {plan.key}")
            store = self.store(plan)
            slot = store.attach(decoded.descriptors[plan.number])
            for name, rows in expected.rows.items():
                read = np.empty_like(rows)
                store.fetch(slot, name, 0, read)
                if not np.array_equal(read, rows):
                    found.append(f"{name} rows of {plan.key}")
            store.detach(slot)
        return found

    def close(self) -> None:
        for store in self.pools:
            store.close()
