"""What a run looks like on screens of several widths, and in files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from emu.sac.report import FULL_WIDTH, clock_label, pace_line, plot, table, write_files

if TYPE_CHECKING:
    from pathlib import Path


def run_of(backend: str, **changed: Any) -> dict[str, Any]:
    both = {"p50": 12345.678, "p99": 23456.789}
    return {
        "backend": backend,
        "clock": {"mode": "virtual", "profile": "sac-server", "dilation": None},
        "ttft_ms": both,
        "ttft_transfer_ms": both,
        "tbt_ms": None,
        "tbt_transfer_ms": None,
        "throughput_tok_s": 123456.7,
        "hot_hit_rate": 0.4567,
        "bytes_fetched": 1 << 40,
        "local_bytes_modelled": 1023 << 20,
        "tokens_match": True,
        "kv_bytes_match": True,
        "differences": [],
        **changed,
    }


def printed(runs: list[dict[str, Any]], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table(runs, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, FULL_WIDTH, 200])
def test_nothing_is_cut(width: int) -> None:
    lines = printed([run_of("rdma-gather"), run_of("hbm", hot_hit_rate=None)], width)
    text = "\n".join(lines)
    assert "…" not in text
    assert "rdma-gather" in text
    assert text.count("12,345.7") == 4
    assert text.count("yes") == 2
    assert ("fetched" in text) == (width >= FULL_WIDTH)
    assert max(len(line) for line in lines) <= width


def test_a_difference_is_shown_where_it_is() -> None:
    wrong = run_of(
        "cxl", kv_bytes_match=False, differences=["request 3: kv layer 1 token 7 byte 9"]
    )
    text = " ".join(" ".join(printed([wrong], 160)).split())
    assert "NO: request 3: kv layer 1 token 7 byte 9" in text


def test_each_clock_says_whose_time_it_is() -> None:
    assert clock_label({"mode": "virtual", "profile": "laptop", "dilation": None}).startswith(
        "model time of laptop"
    )
    assert clock_label({"mode": "off", "profile": None, "dilation": None}).startswith("host time")
    paced = {"mode": "paced", "profile": "laptop", "dilation": 30}
    assert clock_label(paced) == "host time / 30, paced to the model of laptop"


def test_a_paced_run_says_which_dilation_every_design_would_have_held() -> None:
    def paced(backend: str, late_ns: int, needed: float) -> dict[str, Any]:
        facts = {"mode": "paced", "profile": "laptop", "dilation": 30, "paceable_gb_per_s": 2.04}
        return run_of(backend, clock={**facts, "late_ns": late_ns, "dilation_to_hold": needed})

    late, more, fine = (
        paced("cxl", 5_000_000, 41.2),
        paced("dram", 4_000_000, 57.1),
        paced("hbm", 10, 8.0),
    )
    assert pace_line([fine, late, more]) == (
        "this machine can pace 2.0 GB/s at --dilation 30; it was late by up to 5.00 ms (cxl), "
        "--dilation 58 would have held"
    )
    assert pace_line([fine]).endswith("late by up to 0.00 ms (hbm), and held")
    assert pace_line([run_of("cxl")]) == ""


def test_no_legend_and_no_title_of_the_plot_lies_on_the_bars() -> None:
    figure = plot([run_of(name) for name in ("cxl", "rdma-sparse", "rdma-gather", "hbm")])
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "compute and queue",
        "waiting for bytes",
    ]
    assert not any(axes.get_legend() for axes in figure.axes)
    for words in (figure.legends[0], figure._suptitle):
        for axes in figure.axes:
            assert not words.get_window_extent().overlaps(axes.get_window_extent())


def test_files_hold_the_same_runs(tmp_path: Path) -> None:
    runs = [run_of("cxl"), run_of("hbm", hot_hit_rate=None)]
    lines, picture = write_files(runs, tmp_path)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == runs
    assert picture.read_bytes().startswith(b"\x89PNG")
