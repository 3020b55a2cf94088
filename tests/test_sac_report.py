"""What a run looks like on screens of several widths, and in files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from emu.sac.report import (
    FULL_WIDTH,
    clock_label,
    late_warning,
    pace_line,
    plot,
    tables,
    write_files,
)

if TYPE_CHECKING:
    from pathlib import Path


def run_of(backend: str, **changed: Any) -> dict[str, Any]:
    both = {"p50": 12345.678, "p99": 23456.789}
    return {
        "backend": backend,
        "clock": {"mode": "virtual", "profile": "sac-server", "dilation": None},
        "spec": {"arrivals": "closed"},
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
    for each in tables(runs, width):
        Console(file=out, width=width).print(each)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, FULL_WIDTH - 1, FULL_WIDTH, 200])
def test_nothing_is_cut(width: int) -> None:
    lines = printed([run_of("rdma-gather"), run_of("hbm", hot_hit_rate=None)], width)
    text = "\n".join(lines)
    assert "…" not in text
    assert "rdma-gather" in text
    assert text.count("12,345.7") == 4
    assert text.count("yes") == 2
    for words in ("fetched", "local", "1 TiB", "1023 MiB"):
        assert words in text
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
        "this machine's own 0.1 GB/s, times --dilation 30, can pace 2.0 GB/s of modelled links; "
        "it was late by up to 5.00 ms of model time (cxl)"
    )
    assert "--dilation 58 would have held" in late_warning([fine, late, more])
    assert "this machine's and not the model's" in late_warning([late])
    assert pace_line([fine]).endswith("late by up to 0.00 ms of model time (hbm), and held")
    assert late_warning([fine]) == ""
    assert pace_line([run_of("cxl")]) == late_warning([run_of("cxl")]) == ""


def test_a_plot_splits_only_what_the_model_says_and_shows_every_value() -> None:
    off = {"mode": "off", "profile": None, "dilation": None}
    no_parts = {"clock": off, "ttft_transfer_ms": None, "tbt_transfer_ms": None}
    whole = {"tbt_ms": {"p50": 7.0, "p99": 8.0}}
    plain = plot([run_of("cxl", **no_parts, **whole), run_of("hbm", **no_parts, **whole)])
    assert plain.legends == []
    split = plot([run_of("cxl"), run_of("hbm")])
    for figure, containers in ((plain, [1, 1, 1]), (split, [2, 2, 1])):
        assert [len(axes.containers) for axes in figure.axes] == containers
        words = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert words.count("123,457") == 2
        assert words.count("1.23e+04") == 2
    assert [text.get_text() for text in plain.axes[1].texts] == ["7", "7"]


def test_a_plot_of_an_open_loop_says_what_limits_its_throughput() -> None:
    closed, limited = (plot([run_of("cxl", spec={"arrivals": a})]) for a in ("closed", "trace"))
    assert closed.axes[2].get_title() == "throughput"
    assert "limited by the trace's arrivals" in limited.axes[2].get_title()


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
