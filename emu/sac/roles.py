"""What each kind of worker does: prefill writes the pool, decode reads it, the oracle checks both."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from emu.locality.recorded import Recorder
from emu.registry import open_store
from emu.sac.attach import Delivery
from emu.sac.context import DecodeContext
from emu.sac.designs import DESIGNS
from emu.sac.instance import DecodeInstance
from emu.sac.model import DsaModel
from emu.sac.oracle import OracleResult, run_oracle
from emu.sac.plan import RequestPlan
from emu.sac.prefill import PrefillInstance
from emu.sac.report import selections_name
from emu.store import Descriptor, StoreOptions
from emu.timing.clock import PacedClock, make_clock
from emu.timing.system import System

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.sac.channel import Message
    from emu.sac.plan import RunSpec
    from emu.store import KVStore
    from emu.timing.clock import Clock


_LATE_STEPS = 10
"""A paced run holds while it is late by at most one part in so many of the shortest decode step."""


class Role:
    """A worker's state.

    Args:
        spec: the run.
        tick: reports one unit of progress.
    """

    def __init__(self, spec: RunSpec, tick: Callable[[], None]) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._tick = tick
        self._model = DsaModel(spec.config(), spec.kv_dtype, spec.seed)
        self._stores: list[KVStore] = []

    def _open(self, message: Message) -> list[KVStore]:
        options = StoreOptions(coherent=message["coherent"])
        self._stores = [open_store(url, self._model.layout, options) for url in message["urls"]]
        return self._stores

    def _store(self, plan: RequestPlan) -> KVStore:
        return self._stores[plan.device if len(self._stores) > 1 else 0]

    def release(self, message: Message) -> None:
        """Let go of everything in the pool, and close it."""
        for store in self._stores:
            store.close()
        self._stores = []


class PrefillRole(Role):
    """The prefill instance."""

    def __init__(self, spec: RunSpec, tick: Callable[[], None]) -> None:
        super().__init__(spec, tick)
        self._instance = PrefillInstance(self._model, spec)
        self._plans: list[RequestPlan] = []

    def prefill(self, message: Message) -> list[dict[str, Any]]:
        """Write every request's KV into the pool; it stays held until release()."""
        self._open(message)
        self._plans = [RequestPlan.from_json(data) for data in message["requests"]]
        done = []
        for plan in self._plans:
            prefilled = self._instance.run(plan, self._store(plan))
            done.append(
                {
                    "descriptor": prefilled.descriptor.to_bytes().hex(),
                    "computed_tokens": plan.prompt_rows - prefilled.shared_tokens,
                }
            )
            self._tick()
        return done

    def release(self, message: Message) -> None:
        """Delete the run's requests: their space returns with the last reader."""
        for plan in self._plans:
            self._store(plan).delete([plan.key])
        self._plans = []
        super().release(message)


class DecodeRole(Role):
    """The decode instance."""

    def decode(self, message: Message) -> dict[str, Any]:
        """Decode every delivery of one design."""
        design, spec = DESIGNS[message["design"]], self._spec
        pools = self._open(message)
        deliveries = [
            Delivery(
                RequestPlan.from_json(request),
                Descriptor.from_bytes(bytes.fromhex(sent["descriptor"])),
                sent["computed_tokens"],
            )
            for request, sent in zip(message["requests"], message["deliveries"], strict=True)
        ]
        local = self._local(message["copy_bytes"]) if design.prefetch_path else None
        system = System.load(spec.profile, gpus=spec.gpus, devices=spec.devices)
        clock = make_clock(system, spec.time, spec.dilation)
        recorder = Recorder() if message["recordings"] else None
        context = DecodeContext(
            self._model,
            spec,
            design,
            pools,
            local,
            clock,
            system,
            self._tick,
            None if recorder is None else recorder.observe,
        )
        self._instance = DecodeInstance(context)
        try:
            decoded = self._instance.run(deliveries)
        finally:
            if local is not None:
                local.close()
        if message["oplog"]:
            clock.log.write(message["oplog"])
        if recorder is not None:
            for number, recording in recorder.recordings().items():
                recording.write(Path(message["recordings"]) / selections_name(number))
        return {
            "clock": _clock_facts(clock, len(self._model.layout.component("kv").layers)),
            "records": [record.to_json() for record in decoded.records],
            "descriptors": {str(n): d.to_bytes().hex() for n, d in decoded.descriptors.items()},
            "totals": {
                name: getattr(decoded, name)
                for name in ("end_ns", "hits", "misses", "evictions", "local_bytes")
            },
        }

    def _local(self, nbytes: int) -> KVStore:
        return open_store("dram://", self._model.layout, StoreOptions(capacity_bytes=nbytes))

    def release(self, message: Message) -> None:
        """Detach, so that the pool can reclaim."""
        self._instance.release()
        super().release(message)


def _clock_facts(clock: Clock, layers: int) -> dict[str, str | float | None]:
    """What the clock says of itself; in paced mode also the dilation that this run needed."""
    facts = clock.describe()
    if isinstance(clock, PacedClock):
        step_ns = layers * clock.system.compute.decode_layer_ns(1, 0)
        needed = clock.pace.dilation_to_hold(max(step_ns // _LATE_STEPS, 1))
        facts["dilation_to_hold"] = float(f"{needed:.3g}")
    return facts


class OracleRole(Role):
    """The in-memory run that every design must equal, byte for byte."""

    def __init__(self, spec: RunSpec, tick: Callable[[], None]) -> None:
        super().__init__(spec, tick)
        self._results: dict[int, OracleResult] = {}

    def oracle(self, message: Message) -> None:
        """Run every request in memory alone: no store, no hot buffer."""
        for data in message["requests"]:
            plan = RequestPlan.from_json(data)
            prompt = torch.from_numpy(plan.prompt(self._spec).copy())
            self._results[plan.number] = run_oracle(self._model, prompt, plan.request.output_tokens)
            self._tick()

    def verify(self, message: Message) -> list[dict[str, Any]]:
        """Compare the pool's rows and the decoded tokens with the oracle's, request by request."""
        self._open(message)
        verdicts = []
        for data in message["requests"]:
            plan = RequestPlan.from_json(data)
            store, number = self._store(plan), str(plan.number)
            slot = store.attach(
                Descriptor.from_bytes(bytes.fromhex(message["descriptors"][number]))
            )
            try:
                difference = self._first_difference(plan, store, slot)
            finally:
                store.detach(slot)
            expected = self._results[plan.number].tokens
            verdicts.append(
                {"tokens": list(expected) == message["tokens"][number], "difference": difference}
            )
            self._tick()
        self.release(message)
        return verdicts

    def _first_difference(self, plan: RequestPlan, store: KVStore, slot: int) -> str:
        """Where the pool's rows differ from the oracle's; "" where they do not."""
        if store.length(slot) != plan.total_rows:
            return f"{store.length(slot)} rows, {plan.total_rows} expected"
        for component in self._model.layout.components:
            expected = self._results[plan.number].rows[component.name]
            found = np.empty_like(expected)
            store.fetch(slot, component.name, 0, found)
            if not np.array_equal(found, expected):
                layer, token, byte = np.argwhere(found != expected)[0].tolist()
                return f"{component.name} layer {component.layers[layer]} token {token} byte {byte}"
        return ""


ROLES = MappingProxyType({"prefill": PrefillRole, "decode": DecodeRole, "oracle": OracleRole})
