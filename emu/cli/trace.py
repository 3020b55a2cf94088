"""`emu trace`: make, describe and convert request traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table
from emu.cli.options import SIZE
from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from emu.trace.request import Request, Trace
    from emu.trace.summary import Lengths, Summary

BAR_WIDTH = 40
_skip_bad = click.option("--skip-bad", is_flag=True, help="Skip bad lines and count them.")


@click.group()
def command() -> None:
    """Generate and inspect request traces, and the locality of what is read."""


@command.command()
@click.option("--requests", default=100, show_default=True, help="How many requests.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same trace.")
@click.option("--rate", default=3.4, show_default=True, help="Mean arrivals per second (Poisson).")
@click.option("--context", type=int, help="Cut prompts so that prompt + output fit, in tokens.")
@click.option("--output-tokens", type=int, help="Tokens that every request generates.")
@click.option("--out", default="-", show_default=True, help="The file to write, - for stdout.")
def generate(
    requests: int, seed: int, rate: float, context: int | None, output_tokens: int | None, out: str
) -> None:
    """Make a trace of the shape of Mooncake's conversation trace."""
    from emu.trace import GenerateOptions, shape
    from emu.trace import generate as generate_trace

    made = shape(
        generate_trace(GenerateOptions(requests, seed, rate)),
        context=context,
        output_tokens=output_tokens,
    )
    _write(out, made)
    click.echo(f"{len(made)} requests to {out}", err=True)


@command.command()
@click.argument("file")
@click.option("--context", type=int, help="As `emu run --context N` would cut the prompts.")
@json_option
@_skip_bad
def inspect(file: str, context: int | None, as_json: bool, skip_bad: bool) -> None:
    """Describe a trace: counts, lengths, shared blocks, arrivals."""
    from dataclasses import replace

    from emu.trace import read_trace, shape
    from emu.trace import summary as figures
    from emu.trace.shape import fit_outputs

    trace = read_trace(file, skip_bad=skip_bad)
    if context is not None:
        fitting = fit_outputs(trace.requests, context)
        trace = replace(trace, requests=tuple(shape(fitting, context=context)))
    summary = figures.summarise(trace)
    if as_json:
        print_json(figures.as_json(trace, summary))
    else:
        _print_summary(trace, summary)


@command.command()
@click.argument("source", metavar="IN")
@click.argument("out", metavar="OUT")
@_skip_bad
def convert(source: str, out: str, skip_bad: bool) -> None:
    """Write a trace as emu's own JSONL (OUT may be - for stdout)."""
    from emu.trace import read_trace

    if out != "-" and Path(out).exists() and Path(source).exists() and Path(out).samefile(source):
        raise UserError(f"{out}: IN and OUT are the same file", remedy="give another name for OUT")
    trace = read_trace(source, skip_bad=skip_bad)
    _write(out, trace.requests)
    skipped = f", {len(trace.skipped)} bad lines skipped" if trace.skipped else ""
    click.echo(f"{len(trace.requests)} requests ({trace.format}) to {out}{skipped}", err=True)


@command.command()
@click.option(
    "--model", default="glm-5.1", show_default=True, help="A name, or a Hugging Face config.json."
)
@click.option(
    "--context", type=SIZE, default="128K", show_default=True, help="Tokens before the first step."
)
@click.option(
    "--policy",
    type=click.Choice(["lru", "fifo", "random", "belady"]),
    default="lru",
    show_default=True,
    help="Replacement; lru is HiSparse's rule, belady the bound.",
)
@click.option(
    "--hot-buffer",
    type=click.IntRange(1),
    help="Slots per request and layer [default: twice the top-k].",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    help="Rows selected per layer and step [default: the model's].",
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=1024, show_default=True, help="Decode steps."
)
@click.option(
    "--layers",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="Layers to sample, 0 for all.",
)
@click.option(
    "--spread", type=click.FloatRange(0, 2), help="How much layers differ [default: 0.4]."
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    help="A recording (npz) instead of generated streams.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def locality(**options: Any) -> None:
    """Miss rates of a hot buffer and the share of the KV that is touched, from index streams."""
    from emu.locality.model import LocalityModel
    from emu.locality.policies import Buffer
    from emu.locality.recorded import Recording
    from emu.sim.locality_report import Question, generated, recorded
    from emu.sim.models import model_shape

    if options["recorded"] is not None:
        recording = Recording.read(options["recorded"])
        slots = options["hot_buffer"] or 2 * recording.tokens.shape[2]
        figures = recorded(recording, Buffer(slots, options["policy"], options["seed"]))
    else:
        shape = model_shape(options["model"])
        top_k = options["top_k"] or shape.top_k
        model = (
            LocalityModel()
            if options["spread"] is None
            else LocalityModel(spread=options["spread"])
        )
        question = Question(
            shape,
            options["context"],
            options["output_tokens"],
            options["layers"],
            top_k,
            options["seed"],
            model,
        )
        slots = options["hot_buffer"] or 2 * top_k
        figures = generated(question, Buffer(slots, options["policy"], options["seed"]))
    if options["as_json"]:
        print_json(figures)
    else:
        _print_locality(figures)


def _print_locality(figures: dict[str, Any]) -> None:
    click.echo(
        f"top {figures['top_k']} of {figures['context']:,} rows, {figures['hot_buffer']} slots, {figures['policy']}, "
        f"{figures['steps']} steps: {figures['miss_rate']:.1%} of the selected rows missed, "
        f"{figures['kv_touched_fraction']:.1%} of the KV touched"
    )
    rows = [
        (
            layer["layer"],
            *(
                f"{layer[name]:.1%}"
                for name in ("miss_rate", "kv_touched_fraction", "step_overlap")
            ),
        )
        for layer in figures["layers"]
    ]
    print_table(("layer", "missed", "touched", "step overlap"), rows)


def _write(out: str, requests: Sequence[Request]) -> None:
    from emu.trace.write import request_line, write_trace

    if out == "-":
        for request in requests:
            click.echo(request_line(request))
    else:
        write_trace(out, requests)


def _print_summary(trace: Trace, summary: Summary) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    skipped = f", {summary.skipped} bad lines skipped" if summary.skipped else ""
    console.print(
        f"{trace.path}: {summary.requests} requests ({trace.format}){skipped}", markup=False
    )
    console.print(
        f"over {summary.span_ms / 1000:.1f} s, {summary.requests_per_s:.2f} requests per second; "
        f"{summary.blocks} blocks of 512 prompt tokens, {summary.block_reuse:.1%} seen before"
    )
    console.print(_length_table(summary))
    console.print(_histogram("prompt tokens", summary.input))
    for bad in trace.skipped[:10]:
        console.print(f"skipped {bad}", markup=False)
    if len(trace.skipped) > 10:
        console.print(f"and {len(trace.skipped) - 10} more; --json lists them all")


def _length_table(summary: Summary) -> Table:
    from rich.table import Table

    table = Table("tokens", title_justify="left")
    for name in ("mean", "min", *(f"p{p}" for p in summary.input.percentiles), "max", "total"):
        table.add_column(name, justify="right")
    for name, lengths in (("input", summary.input), ("output", summary.output)):
        values = (
            lengths.mean,
            lengths.minimum,
            *lengths.percentiles.values(),
            lengths.maximum,
            lengths.total,
        )
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    return table


def _histogram(title: str, lengths: Lengths) -> Table:
    from rich.table import Table

    table = Table(title, box=None)
    table.add_column("requests", justify="right")
    table.add_column("")
    most = max(n for _, n in lengths.histogram)
    for low, n in lengths.histogram:
        table.add_row(f"{low:,} - {2 * low - 1:,}", f"{n:,}", "#" * round(BAR_WIDTH * n / most))
    return table
