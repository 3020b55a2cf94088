"""From an outcome to the figures that `emu sim` reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from emu.sim.simulate import RECORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from emu.sac.designs import Design
    from emu.sim.simulate import Outcome, SimSpec

BUSY = 0.85
"""Utilisation from which a link is what bounds a run."""


def figures(
    spec: SimSpec, design: Design, outcome: Outcome, measured: tuple[int, int] | None = None
) -> dict[str, Any]:
    """One entry of "runs": model time only.

    Args:
        spec: the setting.
        design: the design.
        outcome: what became of the requests.
        measured: requests that latencies and throughput are about (a steady state), half open; None: all.
    """
    first, last = measured or (0, len(outcome.plans))
    chosen = slice(first, last)
    column = {name: outcome.records[chosen, i] for i, name in enumerate(RECORDS)}
    token_ns, stall_ns = outcome.token_ns[chosen], outcome.stall_ns[chosen]
    began_ns, ended_ns = _window(outcome, first, last)
    end_ns = max(int(times.max()) for times in outcome.token_ns)
    ttft = np.array([times[0] for times in token_ns]) - column["arrived"]
    gaps = np.concatenate([np.diff(times) for times in token_ns])
    stalls = np.concatenate([values[1:] for values in stall_ns])
    first_stall = np.array([values[0] for values in stall_ns])
    tokens = sum(len(times) for times in token_ns)
    produced = sum(
        int(np.count_nonzero((times > began_ns) & (times <= ended_ns)))
        for times in outcome.token_ns
    )
    missed = int(column["rows_missed"].sum())
    selected = tokens * len(spec.shape.kv_layers) * spec.run.top_k
    links = {
        name: {"utilisation": _rounded(busy / max(end_ns, 1)), "bytes": nbytes}
        for name, (busy, nbytes) in outcome.links.items()
        if nbytes
    }
    return {
        "backend": design.name,
        "clock": {"mode": "virtual", "profile": spec.run.profile, "dilation": None},
        "requests": last - first,
        "output_tokens": tokens,
        "ttft_ms": spread_ms(ttft),
        "ttft_transfer_ms": spread_ms(column["attach_transfer_ns"] + first_stall),
        "ttft_queue_ms": spread_ms(column["queue_ns"]),
        "tbt_ms": spread_ms(gaps),
        "tbt_transfer_ms": spread_ms(stalls),
        "throughput_tok_s": _rounded(produced / (max(ended_ns - began_ns, 1) / 1e9)),
        "links": links,
        "bound_by": bound_by(outcome, links),
        "rows_missed": missed,
        "miss_rate": None if design.resident else _rounded(missed / selected),
        "gpu_bytes_peak": sum(outcome.gpu_peak_bytes),
        "host_bytes_peak": outcome.host_peak_bytes,
        "local_bytes_modelled": sum(outcome.gpu_peak_bytes) + outcome.host_peak_bytes,
    }


def _window(outcome: Outcome, first: int, last: int) -> tuple[int, int]:
    """When to count tokens: from the first arrival to the end, or between the ends of as many requests.

    In a steady state the requests do not end in their order, but as many end as begin.
    """
    ends = sorted(int(times[-1]) for times in outcome.token_ns if times[-1] > 0)
    if first == 0:
        return int(outcome.records[:, RECORDS.index("arrived")].min()) - 1, ends[-1]
    return ends[first - 1], ends[last - 1]


def bound_by(outcome: Outcome, links: dict[str, dict[str, float]]) -> str:
    """What to enlarge first: a busy link, memory that kept requests out, the wait for rows, or compute."""
    busiest = max(links, key=lambda name: links[name]["utilisation"], default="")
    if busiest and links[busiest]["utilisation"] >= BUSY:
        return f"link {busiest}"
    if outcome.hbm_refusals:
        return "GPU memory"
    if outcome.host_refusals:
        return "host memory"
    return "reads" if sum(outcome.stalled_ns) > sum(outcome.computing_ns) else "compute"


def spread_ms(values_ns: NDArray[np.int64]) -> dict[str, float] | None:
    """Mean, p50 and p99 in ms; None where there is nothing to tell."""
    if not len(values_ns):
        return None
    p50, p99 = np.percentile(values_ns.astype(np.float64), [50, 99]) / 1e6
    mean = values_ns.mean() / 1e6
    return {"mean": _rounded(mean), "p50": _rounded(p50), "p99": _rounded(p99)}


def _rounded(value: float) -> float:
    return round(float(value), 6)
