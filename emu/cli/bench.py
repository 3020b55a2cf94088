"""`emu bench`: time the data path, as ratios."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table
from emu.errors import UserError
from emu.host_memory import require_free

if TYPE_CHECKING:
    from emu.bench.data_path import Workload

ROW_BYTES = {"bf16": 1152, "fp8": 656}


@click.group("bench", invoke_without_command=True)
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1), help="Turns.")
@click.option("--top-k", default=2048, show_default=True, type=click.IntRange(1), help="Rows.")
@click.option("--context", default=32768, show_default=True, type=click.IntRange(1), help="Tokens.")
@click.option("--kv-dtype", default="bf16", show_default=True, type=click.Choice(list(ROW_BYTES)))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    rounds: int,
    top_k: int,
    context: int,
    kv_dtype: str,
    seed: int,
    as_json: bool,
) -> None:
    """Time gather, scatter, flushes and the stores on this machine.

    All figures are host time of one interleaved run: trust the ratios, not the microseconds. They say nothing
    about the modelled hardware.
    """
    if ctx.invoked_subcommand is not None:
        return
    from emu.bench.data_path import Workload

    result = run(Workload(ROW_BYTES[kv_dtype], top_k, context, seed), rounds)
    if as_json:
        print_json(result)
    else:
        _print(result)


@command.command("index")
@click.option("--vs", type=click.Choice(["redis"]), help="Time that beside it, in the same run.")
@click.option("--records", default=1_000_000, show_default=True, type=click.IntRange(4096))
@click.option("--batch", default=2048, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option("--rounds", default=31, show_default=True, type=click.IntRange(1), help="Turns.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@json_option
def index(vs: str | None, records: int, batch: int, rounds: int, seed: int, as_json: bool) -> None:
    """Time lookups in the pool's index: coherent, not coherent, with more hosts, and against Redis."""
    from rich.console import Console

    from emu.bench.index import IndexWork, run_index

    with Console(stderr=True).status("timing the index"):
        result = run_index(IndexWork(records, batch, rounds, seed), vs_redis=vs == "redis")
    if as_json:
        print_json(result)
    else:
        _print_index(result)


def _print_index(result: dict[str, Any]) -> None:
    click.echo(
        f"Host time, medians of {result['rounds']} interleaved rounds; {result['records']} records."
    )
    rows = [
        (
            f"{title}, {name}",
            f"{one['median_ns'] / 1000:.1f}",
            f"{one['ns_per_lookup']:.1f}",
            f"{one['ratio']['p50']:.2f}",
        )
        for title, group in (
            (f"lookup of {result['batch']}", result["lookup"]),
            (f"walk of {result['prefix_walk']['blocks']}", result["prefix_walk"]),
        )
        for name, one in group.items()
        if name != "blocks"
    ]
    print_table(("", "us", "ns/lookup", "ratio"), rows)
    click.echo()
    header = tuple(result["by_hosts"][0])
    print_table(header, [[f"{one[key]:.0f}" for key in header] for one in result["by_hosts"]])
    if result["redis_skipped"]:
        click.echo(f"not timed: redis: {result['redis_skipped']}")


def run(work: Workload, rounds: int) -> dict[str, Any]:
    """Measure everything; the JSON result.

    Raises:
        UserError: more rows than tokens.
        HostError: it needs more memory than is free.
    """
    from rich.console import Console

    from emu import _native
    from emu.bench.data_path import MappedPool, flush_group, gather_group, scatter_group
    from emu.bench.measure import report
    from emu.bench.stores import store_group

    _check(work)
    with Console(stderr=True).status("timing the data path"), ExitStack() as stack:
        pool = MappedPool(work)
        groups = (
            gather_group(pool),
            scatter_group(pool),
            flush_group(pool, -(-work.row_bytes // 64)),
            flush_group(pool, 16384),
            store_group(work, stack),
        )
        measured = report(groups, rounds)
    return {
        "clock": "host",
        "cpu_features": _native.visibility_features(),
        "rounds": rounds,
        "seed": work.seed,
        "row_bytes": work.row_bytes,
        "top_k": work.top_k,
        "context": work.context,
        "groups": measured,
    }


def _check(work: Workload) -> None:
    if work.top_k > work.context:
        raise UserError(
            f"--top-k {work.top_k} is more than --context {work.context}",
            remedy="make the context longer",
        )
    # The pool, three stores, their rows once more, and room.
    require_free(6 * work.memory_bytes, "the workload", remedy="choose a shorter --context")


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"Host time on this machine, medians of {result['rounds']} interleaved rounds; rows of "
        f"{result['row_bytes']} bytes, top-k {result['top_k']} of {result['context']} tokens.",
        soft_wrap=True,
    )
    for group in result["groups"]:
        table = Table(box=None, pad_edge=False)
        table.add_column(group["group"], no_wrap=True, min_width=28)
        for column in ("us", f"ns/{group['item']}", "GB/s", "ratio", "p15 - p85"):
            table.add_column(column, justify="right", no_wrap=True)
        for case in group["cases"]:
            ratio = case["ratio"]
            table.add_row(
                case["name"],
                f"{case['median_ns'] / 1000:.1f}",
                f"{case['ns_per_item']:.1f}",
                f"{case['gb_per_s']:.1f}",
                f"{ratio['p50']:.2f}",
                f"{ratio['p15']:.2f} - {ratio['p85']:.2f}",
            )
        console.print()
        if group["cases"]:
            console.print(table)
        for skipped in group["skipped"]:
            console.print(f"not timed: {skipped['name']}: {skipped['reason']}", soft_wrap=True)
