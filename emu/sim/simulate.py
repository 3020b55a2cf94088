"""One design at scale: the plan of `emu run`, its rules and its paths, through the native event loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError
from emu.locality.curves import CurveSpec, MissCurves, miss_curves
from emu.locality.model import FITTED, LocalityModel
from emu.sac.plan import RequestPlan, RunSpec, gpu_bytes, place
from emu.timing.system import System
from emu.trace.request import BLOCK_TOKENS
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from emu.sac.designs import Design
    from emu.sim.models import ModelShape
    from emu.trace.request import Request

_NO_PATH = -1


@dataclass(frozen=True, slots=True)
class SimSpec:
    """What to simulate, the requests and the design apart.

    Attributes:
        run: as for `emu run`; its gpus count all servers, its model's name is not looked at, its top_k and
            hot_buffer must be given in rows.
        shape: the model.
        servers: servers that share the pool's switch and devices.
        host_bytes: DRAM of all hosts for KV (copies, or the pool of design dram); 0 is no limit.
        index_prefetch: layers that share a selection have their misses read ahead (HiSparse's exact prefetch).
        prefetch_stalls: the GPUs of a server step together, and not while one of its requests is prefetched.
        locality: of the selections.
        policy: of the hot buffer.
        stop_after: the run stops when so many requests have ended (the others' last times are 0); 0 runs all.
        one_pool: the pool is one store even where the design's is one per device (a memory node).
    """

    run: RunSpec
    shape: ModelShape
    servers: int = 1
    host_bytes: int = 0
    index_prefetch: bool = False
    prefetch_stalls: bool = False
    locality: LocalityModel = FITTED
    policy: str = "lru"
    one_pool: bool | None = None
    stop_after: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of the requests; times in ns of the model.

    Attributes:
        plans: the requests.
        records: int64 [requests, 7]: arrival, attached, queue, prefill compute, attach transfer, rows missed, rows
            missed by the first step.
        token_ns, stall_ns: for each request int64 [output tokens].
        links: name -> (busy_ns, bytes).
        gpu_peak_bytes: per GPU.
        host_peak_bytes: over all hosts.
        stalled_ns, computing_ns: per GPU: waiting for rows, computing.
        hbm_refusals, host_refusals: times that a request with a place found no memory.
        events: of the event loop.
    """

    plans: list[RequestPlan]
    records: NDArray[np.int64]
    token_ns: list[NDArray[np.int64]]
    stall_ns: list[NDArray[np.int64]]
    links: dict[str, tuple[int, int]] = field(default_factory=dict)
    gpu_peak_bytes: list[int] = field(default_factory=list)
    host_peak_bytes: int = 0
    stalled_ns: list[int] = field(default_factory=list)
    computing_ns: list[int] = field(default_factory=list)
    hbm_refusals: int = 0
    host_refusals: int = 0
    events: int = 0


def curves_for(spec: SimSpec, plans: Sequence[RequestPlan]) -> MissCurves:
    """Generated miss curves for the requests of a plan."""
    rows = tuple(spec.shape.rows(plan.prompt_rows) for plan in plans)
    return miss_curves(
        CurveSpec(
            rows,
            spec.shape.anchors,
            spec.run.top_k,
            spec.run.hot_buffer,
            spec.run.seed,
            spec.locality,
            spec.policy,
        )
    )


def simulate(
    spec: SimSpec, design: Design, requests: Sequence[Request], curves: MissCurves | None = None
) -> Outcome:
    """Serve the requests with one design.

    Args:
        spec: the setting.
        design: the design.
        requests: in order of arrival.
        curves: misses; None generates them.

    Raises:
        UserError: a request that no GPU, or the host, can hold; sizes that cannot be.
    """
    plans = place(requests, spec.run, "sim")
    system = System.load(
        spec.run.profile, gpus=spec.run.gpus, devices=spec.run.devices, servers=spec.servers
    )
    rows = _Columns(spec, design, system).of(plans)
    _check(spec, design, plans, rows)
    return _run(spec, design, system, plans, rows, curves or curves_for(spec, plans))


# The order of these names is that of `Field` in emu/native/serving.cc.
_FIELDS = (
    "arrival_ns",
    "gpu",
    "device",
    "prompt_tokens",
    "output_tokens",
    "hbm_bytes",
    "host_bytes",
    "prefill_ns",
    "publish_rows",
    "publish_blocks",
    "prompt_rows",
    "prompt_blocks",
    "fits_hot_buffer",
    "flush_bytes",
    "flush_requests",
    "index_path",
    "miss_path",
    "write_path",
    "prefetch_path",
    "publish_path",
    "flush_path",
)
RECORDS = (
    "arrived",
    "attached",
    "queue_ns",
    "prefill_ns",
    "attach_transfer_ns",
    "rows_missed",
    "rows_first",
)


class _Columns:
    """What each request moves, by the same rules as emu.sac.attach."""

    def __init__(self, spec: SimSpec, design: Design, system: System) -> None:
        self._spec, self._design, self._system = spec, design, system
        self._layout = spec.shape.layout(spec.run.kv_dtype)

    def of(self, plans: Sequence[RequestPlan]) -> NDArray[np.int64]:
        """int64 [requests, fields]."""
        shared = _shared_tokens(plans, self._layout.block_tokens)
        return np.array(
            [
                [self._row(p, s)[name] for name in _FIELDS]
                for p, s in zip(plans, shared, strict=True)
            ],
            np.int64,
        )

    def _row(self, plan: RequestPlan, shared: int) -> dict[str, int]:
        shape, layout, design = self._spec.shape, self._layout, self._design
        rows, total = shape.rows(plan.prompt_rows), shape.rows(plan.total_rows)
        new = total - rows
        computed = plan.prompt_rows - shared
        fits = not design.resident and 0 < rows <= self._spec.run.hot_buffer
        in_host = bool(design.prefetch_path) or design.miss_path == "pool_read.dram"
        return {
            "arrival_ns": round(plan.request.arrival_ms * 1e6),
            "gpu": plan.gpu,
            "device": plan.device,
            "prompt_tokens": plan.prompt_rows,
            "output_tokens": plan.request.output_tokens,
            "hbm_bytes": gpu_bytes(total, design, self._spec.run.hot_buffer, layout)
            + round(plan.total_rows * shape.resident_bytes_per_token),
            "host_bytes": total * layout.token_bytes if in_host else 0,
            "prefill_ns": self._system.compute.prefill_ns(computed, shape.num_layers),
            "publish_rows": shape.rows(computed),
            "publish_blocks": layout.blocks_for(shape.rows(computed)),
            "prompt_rows": rows,
            "prompt_blocks": layout.blocks_for(rows),
            "fits_hot_buffer": int(fits),
            "flush_bytes": new * layout.token_bytes,
            "flush_requests": layout.blocks_for(new) * len(layout.regions),
            **{
                f"{kind}_path": self._path(name, plan)
                for kind, name in (
                    ("index", design.index_path),
                    ("miss", design.miss_path),
                    ("write", design.write_path),
                    ("prefetch", design.prefetch_path),
                    ("publish", design.flush_path or design.write_path),
                    ("flush", design.flush_path),
                )
            },
        }

    def _path(self, name: str, plan: RequestPlan) -> int:
        return self._system.path(name, plan.gpu, plan.device).number if name else _NO_PATH


def _shared_tokens(plans: Sequence[RequestPlan], block_tokens: int) -> list[int]:
    """Leading prompt tokens that an earlier request brought to the same device: they are not computed again."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    shared = []
    for plan in plans:
        ids, known = plan.request.hash_ids, seen.setdefault(plan.device, set())
        count = 0
        while count < len(ids) and ids[: count + 1] in known:
            count += 1
        known.update(ids[: n + 1] for n in range(count, len(ids)))
        shared.append(min(count * BLOCK_TOKENS, plan.prompt_rows // block_tokens * block_tokens))
    return shared


def _check(
    spec: SimSpec, design: Design, plans: Sequence[RequestPlan], rows: NDArray[np.int64]
) -> None:
    hbm, host = rows[:, _FIELDS.index("hbm_bytes")], rows[:, _FIELDS.index("host_bytes")]
    worst = int(hbm.argmax())
    if hbm[worst] > spec.run.hbm_bytes:
        raise UserError(
            f"request {plans[worst].number} needs {format_size(int(hbm[worst]))} of GPU memory with {design.name}, "
            f"there are {format_size(spec.run.hbm_bytes)}",
            remedy="use a larger --hbm-bytes, a shorter --context, or leave that backend out",
        )
    if spec.host_bytes and host.max() > spec.host_bytes:
        raise UserError(
            f"a request needs {format_size(int(host.max()))} of host memory with {design.name}, "
            f"there are {format_size(spec.host_bytes)}",
            remedy="use a larger --host-bytes, or leave that backend out",
        )


def _options(spec: SimSpec, design: Design, system: System) -> _native.ServingOptions:
    options, shape, compute = _native.ServingOptions(), spec.shape, system.compute
    layout = shape.layout(spec.run.kv_dtype)
    per_kv_layer = shape.num_layers / len(shape.kv_layers)
    options.hbm_bytes, options.host_bytes = spec.run.hbm_bytes, spec.host_bytes
    options.base_ns = compute.decode_base_ns.value * per_kv_layer
    options.per_request_ns = compute.decode_per_request_ns.value * per_kv_layer
    options.per_context_ns = compute.decode_per_context_token_ns.value * per_kv_layer
    options.kv_row_bytes = layout.component("kv").row_bytes
    options.index_row_bytes = layout.component("index").row_bytes
    options.tokens_per_row = shape.tokens_per_row
    options.closed = spec.run.arrivals == "closed"
    options.prefill = spec.run.round == 1
    options.prefetches = bool(design.prefetch_path)
    options.resident = design.resident
    run = spec.run
    one_pool = design.scheme != "cxl" if spec.one_pool is None else spec.one_pool
    options.by_device = not one_pool
    options.work_requests = design.work_requests
    options.index_prefetch = spec.index_prefetch
    options.stop_after = spec.stop_after
    options.lockstep_gpus = run.gpus // spec.servers if spec.prefetch_stalls else 0
    return options


def _engine(spec: SimSpec, design: Design, system: System) -> _native.Serving:
    shape, run = spec.shape, spec.run
    places = [run.gpu_slots(gpu) for gpu in range(run.active_gpus)]
    own = {shape.kv_layers.index(layer) for layer in shape.index_layers}
    serving = _native.Serving(
        _options(spec, design, system),
        np.array(places, np.int64),
        np.array(shape.anchors, np.int32),
        np.array([i in own for i in range(len(shape.kv_layers))], np.bool_),
    )
    for model in system.link_models:
        serving.add_link(*model.native())
    for path in system.paths:
        serving.add_path(
            np.array(path.links, np.int32),
            np.array(path.one_message, np.bool_),
            path.write,
            path.setup_ns,
            path.parallelism,
        )
    return serving


def _run(
    spec: SimSpec,
    design: Design,
    system: System,
    plans: list[RequestPlan],
    rows: NDArray[np.int64],
    curves: MissCurves,
) -> Outcome:
    serving = _engine(spec, design, system)
    outputs = [plan.request.output_tokens for plan in plans]
    records = np.zeros((len(plans), len(RECORDS)), np.int64)
    token_ns, stall_ns = (np.zeros(sum(outputs), np.int64) for _ in range(2))
    serving.run(
        rows,
        curves.rows,
        curves.runs,
        curves.warm_steps,
        curves.stream,
        curves.phase,
        records,
        token_ns,
        stall_ns,
    )
    ends = np.cumsum(outputs)[:-1]
    names = system.link_names
    return Outcome(
        plans=plans,
        records=records,
        token_ns=np.split(token_ns, ends),
        stall_ns=np.split(stall_ns, ends),
        links=dict(
            zip(names, zip(serving.link_busy_ns(), serving.link_bytes(), strict=True), strict=True)
        ),
        gpu_peak_bytes=serving.peak_bytes(),
        host_peak_bytes=serving.host_peak,
        stalled_ns=serving.stalled_ns(),
        computing_ns=serving.computing_ns(),
        hbm_refusals=serving.hbm_refusals,
        host_refusals=serving.host_refusals,
        events=serving.events,
    )
