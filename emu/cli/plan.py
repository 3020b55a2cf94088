"""`emu plan`: bandwidth times capacity in closed form."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emu.cli.common import json_option, print_json, print_table
from emu.cli.options import SIZE, Finite

if TYPE_CHECKING:
    from emu.capacity.plan import Compute, Demand, Machine, Plan
    from emu.capacity.sweep import Cell


@click.command("plan")
@click.option(
    "--model", default="glm-5.3", show_default=True, help="A name, or a Hugging Face config.json."
)
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="fp8", show_default=True)
@click.option("--context", type=SIZE, default="16K", show_default=True, help="Tokens per request.")
@click.option(
    "--hbm",
    type=SIZE,
    default="60GiB",
    show_default=True,
    help="GPU memory for hot buffers and index keys, per GPU (G is GiB).",
)
@click.option(
    "--capacity",
    default="1T",
    show_default=True,
    help="External memory of the instance (T is 1e12 bytes, TiB 2^40).",
)
@click.option(
    "--gpus", type=click.IntRange(1), default=4, show_default=True, help="GPUs of the instance."
)
@click.option(
    "--bandwidth",
    type=Finite(0, min_open=True),
    default=64.0,
    show_default=True,
    help="Nominal GB/s of external memory, per GPU.",
)
@click.option(
    "--efficiency",
    type=Finite(0, 1, min_open=True),
    help="Share of the nominal bandwidth that small reads get [default: as fitted].",
)
@click.option(
    "--node-bandwidth",
    type=Finite(0),
    default=0.0,
    help="Nominal GB/s that all GPUs share [default: no limit].",
)
@click.option(
    "--miss",
    type=Finite(0, 1),
    default=0.2,
    show_default=True,
    help="Share of the selected rows that is read.",
)
@click.option(
    "--hot-buffer",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Rows per request and layer.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    help="Rows selected per layer and step [default: the model's].",
)
@click.option("--batch", type=click.IntRange(1), help="Requests per GPU [default: as many as fit].")
@click.option(
    "--batches",
    type=click.Path(path_type=Path),
    help='File of "batch [weight]" lines: your own batches.',
)
@click.option(
    "--sweep",
    "sweep_text",
    multiple=True,
    help="A map, for instance bandwidth=64,225,900,capacity=1T,24T.",
)
@click.option(
    "--base-ms",
    type=Finite(0, min_open=True),
    help="A step's compute, whatever the batch [default: GLM-5.3 on B300, fitted].",
)
@click.option(
    "--request-ms",
    type=Finite(0, min_open=True),
    help="Compute that each request adds to a step [default: GLM-5.3 on B300, fitted].",
)
@json_option
def command(**options: Any) -> None:
    """How large a batch fits, how long its step takes, and what to buy first (XM-Sparse's closed form)."""
    from emu.capacity.plan import plan
    from emu.capacity.sweep import distribution, gains, parse_sweep, read_batches, sweep

    machine, demand, compute = _inputs(options)
    made = plan(machine, demand, compute, options["batch"] or 0)
    found = gains(machine, demand, compute, options["batch"] or 0)
    result: dict[str, Any] = {
        **asdict(made),
        "model": demand.shape.name,
        "demand": {
            name: getattr(demand, name)
            for name in ("context", "miss", "hot_buffer", "selected", "kv_dtype")
        },
        "machine": asdict(machine),
        "compute": asdict(compute),
        "context": demand.context,
        "efficiency": compute.efficiency,
        "doubling_gains": found,
    }
    if options["batches"]:
        result["distribution"] = distribution(
            machine, demand, compute, read_batches(options["batches"])
        )
    cells = []
    if options["sweep_text"]:
        cells = sweep(machine, demand, parse_sweep(",".join(options["sweep_text"])), compute)
        result["sweep"] = [cell.to_json() for cell in cells]
    if options["as_json"]:
        print_json(result)
        return
    _show_inputs(result)
    _show(made, found)
    if "distribution" in result:
        _show_distribution(result["distribution"], made.batch_max)
    if cells:
        _show_map(cells)


def _inputs(options: dict[str, Any]) -> tuple[Machine, Demand, Compute]:
    from emu.capacity.plan import Compute, Demand, Machine
    from emu.capacity.sweep import parse_external
    from emu.sim.models import check_context, check_top_k, model_shape

    shape = model_shape(options["model"])
    check_top_k(options["top_k"], options["context"])
    check_context(shape, options["context"])
    compute = Compute(
        **{name: options[name] for name in ("efficiency", "base_ms", "request_ms") if options[name]}
    )
    machine = Machine(
        options["gpus"],
        options["hbm"],
        parse_external(options["capacity"]),
        options["bandwidth"],
        options["node_bandwidth"],
    )
    demand = Demand(
        shape,
        options["context"],
        options["miss"],
        options["hot_buffer"],
        options["top_k"] or 0,
        options["kv_dtype"],
    )
    return machine, demand, compute


def _show_inputs(result: dict[str, Any]) -> None:
    demand, machine = result["demand"], result["machine"]
    click.echo(
        f"model {result['model']} ({demand['kv_dtype']}): context {demand['context']:,}, top-k {demand['selected']}, "
        f"hot buffer {demand['hot_buffer']}, {demand['miss']:.1%} of the\nselected rows missed (--miss; "
        "`emu trace locality` gives it for a hot buffer)"
    )
    shared = machine["node_gb_per_s"]
    click.echo(
        f"{machine['gpus']} GPUs, {machine['hbm_bytes'] / 2**30:g} GiB each; external memory "
        f"{machine['capacity_bytes'] / 1e12:g} TB at {machine['bandwidth_gb_per_s']:g} GB/s per GPU"
        + (f", {shared:g} shared" if shared else "")
    )
    click.echo(
        "note: a step's compute is GLM-5.3's on B300 GPUs for every model, fitted to XM-Sparse;\n"
        "      --base-ms and --request-ms give another's"
    )


def _show(made: Plan, found: dict[str, float]) -> None:
    rows = (
        (
            "batch per GPU",
            f"{made.batch} (at most {made.batch_max}: {made.bound_by} allows no more)",
        ),
        ("external memory used", f"{made.capacity_used_bytes / 1e12:.3f} TB"),
        ("GPU memory used", f"{made.hbm_used_bytes / 2**30:.1f} GiB"),
        (
            "time between tokens",
            f"{made.tbt_ms:.2f} ms: compute {made.compute_ms:.2f}, reads {made.read_ms:.2f}",
        ),
        ("tokens/s per GPU", f"{made.tokens_per_s_per_gpu:,.0f}"),
    )
    print_table(("model time, closed form", ""), rows)
    click.echo(_advice(found))


def _show_distribution(mine: dict[str, Any], most: int) -> None:
    click.echo(
        f"your batches: {mine['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, mean step {mine['tbt_ms']:.2f} ms"
        + (f"; {mine['cut']} cut to the {most} that fit" if mine["cut"] else "")
    )
    click.echo(f"your batches: {_advice(mine['doubling_gains'])}")


def _advice(found: dict[str, float]) -> str:
    best = max(found, key=lambda name: found[name])
    text = ", ".join(f"{name} {gain:.2f}x" for name, gain in found.items())
    return f"doubling one thing gives: {text}; buy first: {best if found[best] > 1.02 else 'a faster GPU'}"


def _show_map(cells: list[Cell]) -> None:
    rows = [
        (
            f"{cell.capacity_bytes / 1e12:g} TB",
            f"{cell.bandwidth_gb_per_s:g} GB/s",
            "-" if cell.plan is None else cell.plan.batch_max,
            "-" if cell.plan is None else f"{cell.plan.tokens_per_s_per_gpu:,.0f}",
            cell.binds,
        )
        for cell in cells
    ]
    print_table(("capacity", "bandwidth", "batch", "tokens/s per GPU", "binds"), rows)
