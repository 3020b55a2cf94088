"""From records to the figures that a run reports, in the clock's own time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.sac.sequence import Record


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the oracle said of a design.

    Attributes:
        tokens_match: every output token equals the oracle's.
        kv_bytes_match: every KV and index row in the pool equals the oracle's.
        differences: the first difference of each request that has one.
    """

    tokens_match: bool
    kv_bytes_match: bool
    differences: tuple[str, ...]


def run_figures(
    backend: str,
    clock: dict[str, Any],
    records: Sequence[Record],
    totals: dict[str, int],
    verdict: Verdict,
) -> dict[str, Any]:
    """One entry of "runs".

    A clock without a model has no parts: how long its host waited for bytes cannot be told from how long it worked.

    Args:
        backend: the design's name.
        clock: what the clock says of itself: mode, profile, dilation.
        records: per request.
        totals: end_ns, hits, misses, evictions, local_bytes of the decode instance.
        verdict: the oracle's.
    """
    ttft, tbt = [], []
    ttft_transfer, tbt_transfer, queue = [], [], []
    for record in records:
        ttft.append(record.token_ns[0] - record.arrival_ns)
        ttft_transfer.append(record.attach_transfer_ns + record.stall_ns[0])
        tbt += np.diff(record.token_ns).tolist()
        tbt_transfer += record.stall_ns[1:]
        queue.append(record.queue_ns)
    if clock["mode"] == "off":
        ttft_transfer, queue, tbt_transfer = [], [], []
    began_ns = min(record.arrival_ns for record in records)
    output_tokens = sum(len(record.tokens) for record in records)
    lookups = totals["hits"] + totals["misses"]
    held = sum(record.rows_held for record in records)
    return {
        "backend": backend,
        "clock": clock,
        "requests": len(records),
        "output_tokens": output_tokens,
        "ttft_ms": _percentiles_ms(ttft),
        "ttft_transfer_ms": _percentiles_ms(ttft_transfer),
        "ttft_queue_ms": _percentiles_ms(queue),
        "tbt_ms": _percentiles_ms(tbt),
        "tbt_transfer_ms": _percentiles_ms(tbt_transfer),
        "throughput_tok_s": _rounded(output_tokens / ((totals["end_ns"] - began_ns) / 1e9)),
        "bytes_before_first_token": sum(record.bytes_before_first_token for record in records),
        "bytes_fetched": sum(record.bytes_fetched for record in records),
        "rows_missed": totals["misses"],
        "rows_evicted": totals["evictions"],
        "kv_touched_fraction": _rounded(sum(record.rows_touched for record in records) / held),
        "hot_hit_rate": _rounded(totals["hits"] / lookups) if lookups else None,
        "local_bytes_modelled": totals["local_bytes"],
        "tokens_match": verdict.tokens_match,
        "kv_bytes_match": verdict.kv_bytes_match,
        "differences": list(verdict.differences),
    }


def _percentiles_ms(values_ns: list[int]) -> dict[str, float] | None:
    """p50 and p99 in ms; None where there is nothing to tell (one output token has no time between tokens)."""
    if not values_ns:
        return None
    p50, p99 = np.percentile(np.array(values_ns, np.float64), [50, 99]) / 1e6
    return {"p50": _rounded(p50), "p99": _rounded(p99)}


def _rounded(value: float) -> float:
    return round(float(value), 6)
