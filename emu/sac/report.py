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

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = dict[str, Any]
FILES = ("runs.jsonl", "comparison.png")
"""What write_files() makes."""

FULL_WIDTH = 116
"""Columns of the whole table; on a narrower terminal the byte counts are a table of their own."""
_TIMES = ("TTFT ms", "in bytes", "TBT ms", "in bytes", "tok/s", "hit rate")
_SIZES = ("fetched", "local")


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
    return (
        f"this machine's own {clock['paceable_gb_per_s'] / clock['dilation']:.1f} GB/s, times --dilation "
        f"{clock['dilation']:g}, can pace {clock['paceable_gb_per_s']:.1f} GB/s of modelled links; it was late by up "
        f"to {worst['clock']['late_ns'] / 1e6:.2f} ms of model time ({worst['backend']})"
        + ("" if late_warning(runs) else ", and held")
    )


def late_warning(runs: Sequence[Run]) -> str:
    """That the machine did not keep up, and which dilation would have held; "" where it did."""
    clock = runs[0]["clock"]
    if clock["mode"] != "paced":
        return ""
    needed = max(run["clock"]["dilation_to_hold"] for run in runs)
    if needed <= clock["dilation"]:
        return ""
    return (
        f"too slow for --dilation {clock['dilation']:g}: TTFT and TBT are this machine's and not the model's "
        f"(a step that catches up can even be shorter); --dilation {math.ceil(needed)} would have held"
    )


def tables(runs: Sequence[Run], width: int = FULL_WIDTH) -> list[Table]:
    """The comparison, one design a row, for a screen of that many columns: one table, or two narrow ones."""
    wide = width >= FULL_WIDTH
    first = Table(
        title=f"SAC path, {clock_label(runs[0]['clock'])}", caption=_caption(runs), **_STYLE
    )
    _columns(first, "backend", *_TIMES, *(_SIZES if wide else ()), "exact")
    for run in runs:
        exact = run["tokens_match"] and run["kv_bytes_match"]
        first.add_row(
            run["backend"],
            *_times(run),
            *(_sizes(run) if wide else ()),
            "[green]yes[/]" if exact else f"[red]NO: {run['differences'][0]}[/]",
        )
    if wide:
        return [first]
    second = Table(**_STYLE)
    _columns(second, "backend", *_SIZES)
    for run in runs:
        second.add_row(run["backend"], *_sizes(run))
    return [first, second]


_STYLE: dict[str, Any] = {
    "title_justify": "left",
    "caption_justify": "left",
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "pad_edge": False,
}


def _caption(runs: Sequence[Run]) -> str:
    parts = {
        "off": "'in bytes' needs a model",
        "paced": "'in bytes': the part that is waiting for bytes, by the model",
    }.get(runs[0]["clock"]["mode"], "'in bytes': the part that is waiting for bytes")
    return f"medians; {parts}; 'exact': every token and every KV byte equals the in-memory run"


def _columns(table: Table, *names: str) -> None:
    for name in names:
        justify: Literal["left", "right"] = "left" if name in {"backend", "exact"} else "right"
        table.add_column(name, justify=justify, no_wrap=name != "exact")


def _times(run: Run) -> list[str]:
    return [
        *(_p50(run[n]) for n in ("ttft_ms", "ttft_transfer_ms", "tbt_ms", "tbt_transfer_ms")),
        f"{run['throughput_tok_s']:,.0f}",
        "-" if run["hot_hit_rate"] is None else f"{run['hot_hit_rate']:.1%}",
    ]


def _sizes(run: Run) -> list[str]:
    return [format_size(run["bytes_fetched"]), format_size(run["local_bytes_modelled"])]


def _p50(percentiles: dict[str, float] | None) -> str:
    if percentiles is None:
        return "-"
    return f"{percentiles['p50']:,.{3 if percentiles['p50'] < 1000 else 1}f}"


def footer(runs: Sequence[Run]) -> list[str]:
    """What was run, in lines: all that decides the figures and that the table does not say."""
    spec = runs[0]["spec"]
    arrivals = "a closed loop" if spec["arrivals"] == "closed" else "arrivals as in the trace"
    return [
        f"{spec['requests']} requests, prompts of up to {spec['prompt_tokens_max']} tokens, "
        f"{_range(*spec['output_tokens_range'])} (--requests, --context, --output-tokens)",
        f"model {spec['model']} ({spec['kv_dtype']}): top-k {spec['top_k']}, hot buffer {spec['hot_buffer']}; "
        f"{_count(spec['gpus'], 'GPU')}, {_count(spec['devices'], 'device')}, {spec['placement']}; "
        f"{arrivals}, {spec['concurrency']} in flight; round {spec['round']}",
    ]


def _range(least: int, most: int) -> str:
    return _count(most, "output token") if least == most else f"{least} to {most} output tokens"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def write_files(runs: Sequence[Run], directory: Path) -> list[Path]:
    """runs.jsonl and comparison.png; the files written."""
    lines, picture = (directory / name for name in FILES)
    lines.write_text("".join(json.dumps(run) + "\n" for run in runs))
    plot(runs).savefig(picture, dpi=120)
    return [lines, picture]


def plot(runs: Sequence[Run]) -> Figure:
    """TTFT and TBT, split into waiting for bytes and the rest where the model says so, and throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, tbt, throughput = figure.subplots(1, 3)
    _plot_times(ttft, runs, "ttft", "time to first token")
    _plot_times(tbt, runs, "tbt", "time between tokens")
    names = [run["backend"] for run in runs]
    bars = throughput.bar(names, [run["throughput_tok_s"] for run in runs], color="#4f81bd")
    throughput.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    limited = runs[0]["spec"]["arrivals"] == "trace"
    throughput.set(
        title="throughput" + (" (limited by the trace's arrivals)" if limited else ""),
        ylabel="tokens per second",
    )
    for axes in (ttft, tbt, throughput):
        for label in axes.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.1)
    # One legend below the axes: inside them it would lie on the bars of some run.
    handles, labels = ttft.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False)
    figure.suptitle(clock_label(runs[0]["clock"]), fontsize=10)
    return figure


def _plot_times(axes: Axes, runs: Sequence[Run], metric: str, title: str) -> None:
    """Bars of one metric; each is the whole time, and what waiting for bytes is of it has its own colour."""
    names = [run["backend"] for run in runs]
    whole = [(run[f"{metric}_ms"] or {"p50": 0.0})["p50"] for run in runs]
    axes.set(title=f"{title}, median", ylabel="ms")
    if runs[0]["clock"]["mode"] == "off":
        axes.bar_label(axes.bar(names, whole, color="#b8c4d0"), fmt="{:,.3g}", fontsize=8)
        return
    waiting = [(run[f"{metric}_transfer_ms"] or {"p50": 0.0})["p50"] for run in runs]
    rest = [max(0.0, w - t) for w, t in zip(whole, waiting, strict=True)]
    late = ", late host" if runs[0]["clock"]["mode"] == "paced" else ""
    axes.bar(names, rest, label=f"compute and queue{late}", color="#b8c4d0")
    top = axes.bar(names, waiting, bottom=rest, label="waiting for bytes", color="#c0504d")
    axes.bar_label(top, labels=[f"{value:,.3g}" for value in whole], fontsize=8)


def plan_lines(plan: dict[str, Any], testbed: str | None) -> list[str]:
    """A plan (RunPlan.to_json) as `--dry-run` prints it."""
    spec = plan["spec"]
    where = f"testbed {testbed}" if testbed else "a testbed made for the run"
    rows = [("request", "gpu", "device", "prompt", "output")]
    for r in plan["requests"]:
        numbers = (r["number"], r["gpu"], r["device"], r["input_tokens"], r["output_tokens"])
        rows.append(tuple(map(str, numbers)))  # type: ignore[arg-type]
    trace = spec["trace"]
    return [
        f"{', '.join(plan['designs'])} on {where}, {clock_label(_planned_clock(spec))}",
        *footer([{"spec": spec}]),
        f"trace {trace['name']}, sha256 {trace['sha256']}"
        if trace["sha256"]
        else "generated trace",
        *(
            "  ".join(cell.rjust(len(name)) for cell, name in zip(row, rows[0], strict=True))
            for row in rows
        ),
        f"takes {format_size(plan['device_bytes'])} on the fullest CXL device; {format_size(plan['pool_bytes'])} in "
        f"one pool of all requests; {format_size(plan['copy_bytes'])} of copies where a design prefetches",
        *(f"note: {note}" for note in plan["notes"]),
    ]


def _planned_clock(spec: dict[str, Any]) -> dict[str, Any]:
    return {"mode": spec["time"], "profile": spec["profile"], "dilation": spec["dilation"]}
