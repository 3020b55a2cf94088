"""What a run looks like: a table for people, JSONL and a plot for a directory."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.table import Table

from emu.sac.designs import DESIGNS
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

Run = dict[str, Any]
FILES = ("runs.jsonl", "comparison.png")
"""What write_files() makes."""

FULL_WIDTH = 116
"""Columns of the whole table; a narrower terminal gets it without the byte counts."""


def oplog_name(design: str) -> str:
    """File name of a design's operation log."""
    return f"ops-{design}.jsonl"


def selections_name(request: int | str) -> str:
    """File name of a request's recorded selections."""
    return f"selections-{request}.npz"


def result_files(directory: Path) -> list[Path]:
    """Every file that some run may write there, whether it is there or not; of selections, those that are there."""
    fixed = [directory / name for name in (*FILES, *map(oplog_name, DESIGNS))]
    return fixed + sorted(directory.glob(selections_name("[0-9]*")))


def clear_results(directory: Path) -> None:
    """Remove what an earlier run wrote there, and nothing else: results of two runs must not lie side by side."""
    for path in result_files(directory):
        path.unlink(missing_ok=True)


def clock_label(clock: dict[str, Any]) -> str:
    """Whose time the figures are, in words."""
    if clock["mode"] == "off":
        return "host time of this machine (mode off): nothing is modelled"
    if clock["mode"] == "paced":
        return f"host time / {clock['dilation']:g}, paced to the model of {clock['profile']}"
    return f"model time of {clock['profile']} (mode {clock['mode']})"


def pace_line(runs: Sequence[Run]) -> str:
    """Whether this machine kept up with the model, over all designs; "" where it did not have to."""
    clock = runs[0]["clock"]
    if clock["mode"] != "paced":
        return ""
    worst = max(runs, key=lambda run: run["clock"]["late_ns"])
    needed = max(run["clock"]["dilation_to_hold"] for run in runs)
    held = needed <= clock["dilation"]
    return (
        f"this machine can pace {clock['paceable_gb_per_s']:.1f} GB/s at --dilation {clock['dilation']:g}; "
        f"it was late by up to {worst['clock']['late_ns'] / 1e6:.2f} ms ({worst['backend']}), "
        + ("and held" if held else f"--dilation {math.ceil(needed)} would have held")
    )


def table(runs: Sequence[Run], width: int = FULL_WIDTH) -> Table:
    """The comparison, one design a row, for a screen of that many columns."""
    caption = (
        "medians; 'in bytes': the part that is waiting for bytes; "
        "'exact': every token and every KV byte equals the in-memory run"
    )
    result = Table(
        title=f"SAC path, {clock_label(runs[0]['clock'])}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = ["backend", "TTFT ms", "in bytes", "TBT ms", "in bytes", "tok/s", "hit rate"]
    wide = width >= FULL_WIDTH
    for name in [*names, *(("fetched", "local") if wide else ()), "exact"]:
        justify: Literal["left", "right"] = "left" if name in {"backend", "exact"} else "right"
        result.add_column(name, justify=justify, no_wrap=name != "exact")
    for run in runs:
        exact = run["tokens_match"] and run["kv_bytes_match"]
        sizes = (format_size(run["bytes_fetched"]), format_size(run["local_bytes_modelled"]))
        result.add_row(
            run["backend"],
            *(_p50(run[n]) for n in ("ttft_ms", "ttft_transfer_ms", "tbt_ms", "tbt_transfer_ms")),
            f"{run['throughput_tok_s']:,.0f}",
            "-" if run["hot_hit_rate"] is None else f"{run['hot_hit_rate']:.1%}",
            *(sizes if wide else ()),
            "[green]yes[/]" if exact else f"[red]NO: {run['differences'][0]}[/]",
        )
    return result


def _p50(percentiles: dict[str, float] | None) -> str:
    if percentiles is None:
        return "-"
    return f"{percentiles['p50']:,.{3 if percentiles['p50'] < 1000 else 1}f}"


def write_files(runs: Sequence[Run], directory: Path) -> list[Path]:
    """runs.jsonl and comparison.png; the files written."""
    lines, picture = (directory / name for name in FILES)
    lines.write_text("".join(json.dumps(run) + "\n" for run in runs))
    plot(runs).savefig(picture, dpi=120)
    return [lines, picture]


def plot(runs: Sequence[Run]) -> Figure:
    """TTFT and TBT, each split into waiting for bytes and the rest where that is known, and throughput."""
    from matplotlib.figure import Figure

    names = [run["backend"] for run in runs]
    waits_known = runs[0]["clock"]["mode"] == "virtual"
    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, tbt, throughput = figure.subplots(1, 3)
    for axes, metric, title in (
        (ttft, "ttft", "time to first token"),
        (tbt, "tbt", "time between tokens"),
    ):
        whole = [(run[f"{metric}_ms"] or {"p50": 0.0})["p50"] for run in runs]
        waiting = [(run[f"{metric}_transfer_ms"] or {"p50": 0.0})["p50"] for run in runs]
        rest = [max(0.0, w - t) for w, t in zip(whole, waiting, strict=True)]
        label = "compute and queue" if waits_known else "compute, queue and bytes"
        axes.bar(names, rest, label=label, color="#b8c4d0")
        if waits_known:
            axes.bar(names, waiting, bottom=rest, label="waiting for bytes", color="#c0504d")
        axes.set(title=f"{title}, median", ylabel="ms")
    throughput.bar(names, [run["throughput_tok_s"] for run in runs], color="#4f81bd")
    throughput.set(title="throughput", ylabel="tokens per second")
    for axes in (ttft, tbt, throughput):
        for label in axes.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.spines[["top", "right"]].set_visible(False)
    # One legend below the axes: inside them it would lie on the bars of some run.
    handles, labels = ttft.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    figure.suptitle(clock_label(runs[0]["clock"]), fontsize=10)
    return figure
