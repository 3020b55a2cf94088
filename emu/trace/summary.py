"""A trace in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from emu.trace.request import Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of a token count over the requests.

    Attributes:
        total: sum.
        mean: arithmetic mean.
        minimum: smallest.
        percentiles: by percentile, interpolated linearly.
        maximum: largest.
        histogram: (lower bound, requests) of power-of-two ranges, from the smallest to the largest in use.
    """

    total: int
    mean: float
    minimum: int
    percentiles: dict[int, float]
    maximum: int
    histogram: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace's figures.

    Attributes:
        requests: requests read.
        skipped: bad lines skipped.
        span_ms: first arrival to last.
        requests_per_s: mean arrival rate over the span; 0 for a span of 0.
        input: prompt lengths, tokens.
        output: output lengths, tokens.
        blocks: 512-token prompt blocks over all requests.
        unique_blocks: different ones among them.
    """

    requests: int
    skipped: int
    span_ms: float
    requests_per_s: float
    input: Lengths
    output: Lengths
    blocks: int
    unique_blocks: int

    @property
    def block_reuse(self) -> float:
        """The share of blocks that an earlier request had already, 0..1."""
        return 1 - self.unique_blocks / self.blocks


def summarise(trace: Trace) -> Summary:
    """The figures of a trace, which has at least one request."""
    requests = trace.requests
    span_ms = requests[-1].arrival_ms - requests[0].arrival_ms
    return Summary(
        requests=len(requests),
        skipped=len(trace.skipped),
        span_ms=span_ms,
        requests_per_s=(len(requests) - 1) / span_ms * 1000 if span_ms else 0.0,
        input=_lengths([r.input_tokens for r in requests]),
        output=_lengths([r.output_tokens for r in requests]),
        blocks=sum(len(r.hash_ids) for r in requests),
        unique_blocks=len({i for r in requests for i in r.hash_ids}),
    )


def as_json(trace: Trace, summary: Summary) -> dict[str, Any]:
    """What `emu trace inspect --json` prints, less the schema_version."""
    return {
        "file": trace.path,
        "format": trace.format,
        "requests": summary.requests,
        "skipped": [{"line": bad.line, "reason": bad.reason} for bad in trace.skipped],
        "span_ms": summary.span_ms,
        "requests_per_s": summary.requests_per_s,
        "input_tokens": _lengths_json(summary.input),
        "output_tokens": _lengths_json(summary.output),
        "blocks": {
            "total": summary.blocks,
            "unique": summary.unique_blocks,
            "reuse": summary.block_reuse,
        },
    }


def _lengths(values: list[int]) -> Lengths:
    array = np.array(values, dtype=np.int64)
    powers = [value.bit_length() - 1 for value in values]
    counts = dict.fromkeys(range(min(powers), max(powers) + 1), 0)
    for power in powers:
        counts[power] += 1
    return Lengths(
        total=int(array.sum()),
        mean=float(array.mean()),
        minimum=int(array.min()),
        percentiles={p: float(np.percentile(array, p)) for p in PERCENTILES},
        maximum=int(array.max()),
        histogram=tuple((1 << power, n) for power, n in counts.items()),
    )


def _lengths_json(lengths: Lengths) -> dict[str, Any]:
    return {
        "total": lengths.total,
        "mean": lengths.mean,
        "min": lengths.minimum,
        **{f"p{p}": value for p, value in lengths.percentiles.items()},
        "max": lengths.maximum,
        "histogram": [{"from": low, "requests": n} for low, n in lengths.histogram],
    }
