"""What each request moves and holds, as the native event loop takes it: by the same rules as emu.sac.attach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emu.errors import UserError
from emu.sac.plan import gpu_bytes
from emu.trace.request import BLOCK_TOKENS
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from emu.sac.designs import Design
    from emu.sac.plan import RequestPlan
    from emu.sim.simulate import SimSpec
    from emu.timing.system import System

_NO_PATH = -1

# The order of these names is that of `Field` in emu/native/serving.cc.
COLUMNS = (
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


def request_columns(
    spec: SimSpec, design: Design, system: System, plans: Sequence[RequestPlan]
) -> NDArray[np.int64]:
    """int64 [requests, fields], a column for each of `Field` in emu/native/serving.cc.

    Raises:
        UserError: a request that no GPU, or the host, can hold.
    """
    rows = _Columns(spec, design, system).of(plans)
    _check(spec, design, plans, rows)
    return rows


class _Columns:
    def __init__(self, spec: SimSpec, design: Design, system: System) -> None:
        self._spec, self._design, self._system = spec, design, system
        self._layout = spec.shape.layout(spec.run.kv_dtype)

    def of(self, plans: Sequence[RequestPlan]) -> NDArray[np.int64]:
        """int64 [requests, fields]."""
        one_pool = self._spec.has_one_pool(self._design)
        shared = _shared_tokens(plans, self._layout.block_tokens, one_pool)
        rows = (self._row(plan, tokens) for plan, tokens in zip(plans, shared, strict=True))
        return np.array([[row[name] for name in COLUMNS] for row in rows], np.int64)

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


def _shared_tokens(plans: Sequence[RequestPlan], block_tokens: int, one_pool: bool) -> list[int]:
    """Leading prompt tokens that an earlier request brought to the same store: they are not computed again."""
    # A tree of prefixes: (prefix, id of the next block) -> the longer prefix. A store is a root, below 0.
    tree: dict[tuple[int, int], int] = {}
    shared = []
    for plan in plans:
        prefix, count = -1 if one_pool else -1 - plan.device, 0
        for block in plan.request.hash_ids:
            known = len(tree)
            longer = tree.setdefault((prefix, block), known)
            count += longer != known
            prefix = longer
        shared.append(min(count * BLOCK_TOKENS, plan.prompt_rows // block_tokens * block_tokens))
    return shared


def _check(
    spec: SimSpec, design: Design, plans: Sequence[RequestPlan], rows: NDArray[np.int64]
) -> None:
    hbm, host = rows[:, COLUMNS.index("hbm_bytes")], rows[:, COLUMNS.index("host_bytes")]
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
