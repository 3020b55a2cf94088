"""From records to reported figures."""

from __future__ import annotations

from typing import Any

import pytest

from emu.sac.figures import Verdict, run_figures
from emu.sac.sequence import Record

PARTS = ("ttft_transfer_ms", "ttft_queue_ms", "tbt_transfer_ms")


def figures(mode: str) -> dict[str, Any]:
    record = Record(0, 0, 0, attach_transfer_ns=10_000, token_ns=[1_000_000, 3_000_000])
    record.stall_ns, record.rows_held = [5_000, 7_000], 1
    totals = {"end_ns": 3_000_000, "hits": 1, "misses": 3, "evictions": 0, "local_bytes": 0}
    return run_figures("cxl", {"mode": mode}, [record], totals, Verdict(True, True, ()))


@pytest.mark.parametrize("mode", ["virtual", "paced"])
def test_a_modelled_run_has_parts(mode: str) -> None:
    run = figures(mode)
    assert [run[name]["p50"] for name in PARTS] == [0.015, 0.0, 0.007]
    assert (run["ttft_ms"]["p50"], run["tbt_ms"]["p50"]) == (1.0, 2.0)
    assert run["hot_hit_rate"] == 0.25


def test_host_time_alone_has_none() -> None:
    run = figures("off")
    assert [run[name] for name in PARTS] == [None, None, None]
    assert run["ttft_ms"]["p50"] == 1.0
