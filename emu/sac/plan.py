"""What a run will do, before anything is started: which request runs where, and what it needs."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from emu.errors import UserError
from emu.sac.config import ModelConfig, preset
from emu.trace.prompts import block_hashes, prompt_tokens
from emu.trace.request import Request
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from emu.layout import KVLayout
    from emu.sac.designs import Design
    from emu.sac.row_format import KVDtype


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that decides a run's results, the machine apart.

    Attributes:
        model: preset name.
        kv_dtype: "bf16" or "fp8".
        top_k: selected tokens per layer and step; 0 takes the model's own.
        hot_buffer: slots per request and layer; 0 takes the model's own.
        gpus, devices: decode GPUs, and CXL devices of the pool.
        placement: "round-robin" over the devices, or "single" (all on the first).
        round: 2 finds the KV in the pool; 1 charges its prefill too.
        concurrency: requests in flight over all GPUs (closed loop).
        arrivals: "closed" (a request arrives when one ends) or "trace" (at the trace's times).
        hbm_bytes: GPU memory for KV rows and index keys, per GPU.
        profile, time, dilation: system profile, "off", "virtual" or "paced", and the paced mode's factor.
        seed: of the model's weights and the prompts.
    """

    model: str = "tiny"
    kv_dtype: KVDtype = "bf16"
    top_k: int = 0
    hot_buffer: int = 0
    gpus: int = 4
    devices: int = 2
    placement: str = "round-robin"
    round: int = 2
    concurrency: int = 8
    arrivals: str = "closed"
    hbm_bytes: int = 60 << 30
    profile: str = "sac-server"
    time: str = "virtual"
    dilation: float = 1.0
    seed: int = 0

    def config(self) -> ModelConfig:
        """The model, with the overrides.

        Raises:
            UserError: an unknown preset, or sizes that do not fit each other.
        """
        config = preset(self.model)
        config = replace(
            config,
            top_k=self.top_k or config.top_k,
            hot_buffer=self.hot_buffer or config.hot_buffer,
        )
        if config.hot_buffer < config.top_k:
            raise UserError(
                f"a hot buffer of {config.hot_buffer} slots cannot hold the top {config.top_k} tokens",
                remedy=f"give --hot-buffer {config.top_k} or more",
            )
        return config

    @property
    def active_gpus(self) -> int:
        """GPUs that get requests: never more than there are requests in flight."""
        return min(self.gpus, self.concurrency)

    def gpu_slots(self, gpu: int) -> int:
        """Requests in flight on a GPU."""
        return self.concurrency // self.active_gpus + (gpu < self.concurrency % self.active_gpus)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request of a run.

    Attributes:
        run: names the run among all that use the same pool: what another one left there is never taken for ours.
        number: place in the run.
        request: lengths and hash ids.
        gpu, device: where it decodes and where its KV lies.
    """

    run: str
    number: int
    request: Request
    gpu: int
    device: int

    @property
    def label(self) -> str:
        """Its name in the operation log, the same in every run."""
        return f"request-{self.number}"

    @property
    def key(self) -> str:
        """Its key in the pool."""
        return f"{self.run}/{self.label}"

    @property
    def prompt_rows(self) -> int:
        """Rows that prefill writes: the last prompt token is the decode instance's first input."""
        return self.request.input_tokens - 1

    @property
    def total_rows(self) -> int:
        """Rows when the request has ended: each decode step appends one."""
        return self.prompt_rows + self.request.output_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data for a worker."""
        return {
            "run": self.run,
            "number": self.number,
            "request": asdict(self.request),
            "gpu": self.gpu,
            "device": self.device,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RequestPlan:
        """What to_json() made."""
        fields = dict(data["request"], hash_ids=tuple(data["request"]["hash_ids"]))
        return cls(**{**data, "request": Request(**fields)})

    def prompt(self, spec: RunSpec) -> NDArray[np.int64]:
        """The prompt's tokens, int64 [input_tokens], read-only."""
        return _prompt(self.request, spec.config().vocab, spec.seed)

    def hashes(self, spec: RunSpec, block_tokens: int) -> list[bytes]:
        """Chain hashes of the full blocks that prefill writes.

        They are keyed by everything that decides a row's bytes, so a pool never gives rows of another model, and by
        the run, so that its figures do not depend on what an earlier one left.
        """
        identity = repr((self.run, spec.config(), spec.kv_dtype, spec.seed))
        key = hashlib.blake2b(identity.encode(), digest_size=32).digest()
        chain = _chain(self.request, spec.config().vocab, spec.seed, self.prompt_rows, block_tokens)
        return [hashlib.blake2b(link, key=key, digest_size=16).digest() for link in chain]


@lru_cache(maxsize=256)
def _prompt(request: Request, vocab: int, seed: int) -> NDArray[np.int64]:
    tokens = prompt_tokens(request, vocab, seed)
    tokens.flags.writeable = False
    return tokens


@lru_cache(maxsize=256)
def _chain(
    request: Request, vocab: int, seed: int, rows: int, block_tokens: int
) -> tuple[bytes, ...]:
    return tuple(block_hashes(_prompt(request, vocab, seed)[:rows], block_tokens))


_LONGEST_MS = 30 * 24 * 3600 * 1000


def place(requests: Sequence[Request], spec: RunSpec, run: str) -> list[RequestPlan]:
    """Give every request its GPU and its device: SAC's round-robin over GPU and device pairs.

    Args:
        requests: what to place.
        spec: the run.
        run: names it among all that use the same pool.

    Raises:
        UserError: a request without a token to read, or nothing to do.
    """
    if not requests:
        raise UserError(
            "no requests to run", remedy="give a trace with requests, or --requests 1 or more"
        )
    for number, request in enumerate(requests):
        if request.input_tokens < 2:
            raise UserError(
                f"request {number} has a prompt of {request.input_tokens} token: nothing to cache",
                remedy="use prompts of 2 tokens or more (a larger --context)",
            )
    first_ms = min(request.arrival_ms for request in requests)
    span_ms = max(request.arrival_ms for request in requests) - first_ms
    if spec.arrivals == "trace" and span_ms > _LONGEST_MS:
        raise UserError(
            f"the last request arrives {span_ms / 86_400_000:.0f} days after the first",
            remedy="leave --arrivals trace out, or use fewer --requests of the trace",
        )
    requests = [replace(r, arrival_ms=r.arrival_ms - first_ms) for r in requests]
    devices = 1 if spec.placement == "single" else spec.devices
    return [
        RequestPlan(run, i, r, i % spec.active_gpus, i % devices) for i, r in enumerate(requests)
    ]


def blocks_needed(
    plans: Sequence[RequestPlan], spec: RunSpec, layout: KVLayout, devices: int
) -> list[int]:
    """Blocks that each of so many devices must hold: shared prefix blocks counted once per device."""
    shared: list[set[bytes]] = [set() for _ in range(devices)]
    own = [0] * devices
    for plan in plans:
        device = plan.device if devices > 1 else 0
        hashes = plan.hashes(spec, layout.block_tokens)
        shared[device].update(hashes)
        own[device] += layout.blocks_for(plan.prompt_rows) - len(hashes)
        own[device] += layout.blocks_for(plan.request.output_tokens)
    return [len(s) + o for s, o in zip(shared, own, strict=True)]


def device_bytes_needed(blocks: Sequence[int], layout: KVLayout) -> int:
    """Size of the largest of the devices, header and metadata included, in whole 2 MiB."""
    need = layout.device_bytes(max(blocks))
    return -(-need // (2 << 20)) * (2 << 20)


def copy_bytes_needed(plans: Sequence[RequestPlan], spec: RunSpec, layout: KVLayout) -> int:
    """Host DRAM for the whole KV of the largest requests that can be in flight at once, nothing shared."""
    blocks = sorted(
        layout.blocks_for(plan.prompt_rows) + layout.blocks_for(plan.request.output_tokens)
        for plan in plans
    )
    return device_bytes_needed([sum(blocks[-spec.concurrency :])], layout)


def check_devices(blocks: Sequence[int], layout: KVLayout, sizes: Sequence[int]) -> None:
    """Refuse a run that its CXL devices cannot hold.

    Raises:
        UserError: with both sizes.
    """
    for number, (need, size) in enumerate(zip(blocks, sizes, strict=True)):
        have = layout.num_blocks(size)
        if need > have:
            wanted = layout.device_bytes(need)
            raise UserError(
                f"device {number} holds {format_size(size)}, but the requests placed on it need {format_size(wanted)}",
                remedy=f"use --device-size {-(-wanted >> 20)}M, more devices, fewer requests or a shorter --context",
            )


def hbm_request_bytes(
    plan: RequestPlan, design: Design, config: ModelConfig, layout: KVLayout
) -> int:
    """GPU memory that a request takes while it decodes."""
    return gpu_bytes(plan.total_rows, design, config.hot_buffer, layout)


def gpu_bytes(total_rows: int, design: Design, hot_buffer: int, layout: KVLayout) -> int:
    """GPU memory of a request that ends with so many rows: rows (all, or a hot buffer's) and index keys."""
    kv, index = layout.component("kv"), layout.component("index")
    rows = total_rows if design.resident else hot_buffer + 1
    return rows * kv.row_bytes * len(kv.layers) + total_rows * index.row_bytes * len(index.layers)


def check_hbm(
    plans: Sequence[RequestPlan], designs: Sequence[Design], spec: RunSpec, layout: KVLayout
) -> None:
    """Refuse requests that do not fit a GPU on their own.

    Raises:
        UserError: names the request, the design and both sizes.
    """
    config = spec.config()
    for design in designs:
        for plan in plans:
            need = hbm_request_bytes(plan, design, config, layout)
            if need > spec.hbm_bytes:
                raise UserError(
                    f"request {plan.number} needs {format_size(need)} of GPU memory with {design.name}, "
                    f"there are {format_size(spec.hbm_bytes)}",
                    remedy="use a larger --hbm-bytes, a shorter --context, or leave that backend out",
                )
