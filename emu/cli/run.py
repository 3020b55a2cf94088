"""`emu run`: the SAC path for real, every token and KV byte checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from emu.cli.options import SIZE


@click.command("run")
@click.option(
    "--backend",
    default="all",
    show_default=True,
    help="Designs, comma-separated: cxl, rdma, rdma-sparse, rdma-gather, dram, hbm.",
)
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="Model preset: tiny (2 layers) or small (4 layers).",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["bf16", "fp8"]),
    default="bf16",
    show_default=True,
    help="KV rows of 1152 or 656 bytes.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    help="Selected tokens per layer and step [default: tiny 64, small 2048].",
)
@click.option(
    "--hot-buffer",
    type=click.IntRange(1),
    help="Hot buffer slots per request and layer [default: tiny 128, small 4096].",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    help="Decode GPUs [default: 4, or the profile's where it has fewer].",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 16),
    help="CXL devices to use [default: the testbed's, else the profile's].",
)
@click.option(
    "--placement",
    type=click.Choice(["round-robin", "single"]),
    default="round-robin",
    show_default=True,
    help="Devices that requests go to.",
)
@click.option(
    "--round",
    "round_",
    type=click.IntRange(1, 2),
    default=2,
    show_default=True,
    help="2: the KV is in the pool already; 1: prefill is timed too.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["closed", "trace"]),
    default="closed",
    show_default=True,
    help="A request arrives when one ends, or at the trace's times.",
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path),
    help="Mooncake JSONL, Azure CSV or emu JSONL [default: a generated one].",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="How many requests of the trace.",
)
@click.option(
    "--context",
    type=click.IntRange(3),
    default=2048,
    show_default=True,
    help="Prompt and output together; longer prompts keep their head.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1),
    help="Tokens to decode per request [default: the trace's own, or 16 for the generated one].",
)
@click.option("--skip-bad", is_flag=True, help="Skip and count malformed lines of the trace.")
@click.option(
    "--hbm-bytes",
    type=SIZE,
    default="60G",
    show_default=True,
    help="GPU memory for KV rows and index keys, per GPU.",
)
@click.option(
    "--time",
    "time_mode",
    type=click.Choice(["off", "virtual", "paced"]),
    default="virtual",
    show_default=True,
    help="Clock of the figures.",
)
@click.option(
    "--dilation",
    type=click.FloatRange(1.0),
    default=1.0,
    help="Paced mode: model time times this [default: 1].",
)
@click.option(
    "--profile", help="System profile, see `emu profiles` [default: the testbed's, or sac-server]."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of weights, prompts and the generated trace.",
)
@click.option(
    "--name", help="Testbed to run on [default: the one that is up, else an ephemeral one]."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where an ephemeral testbed is made [default: /dev/shm].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory for runs.jsonl, comparison.png, operation logs and selections (see emu trace locality); "
    "replaces an earlier run's.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would run where (with --json as JSON), and stop."
)
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON on stdout.")
def command(**options: Any) -> None:
    """Run prefill, publish, sparse reads and write-back for real, on every design, and compare."""
    from emu.cli.signals import ending_by_exception
    from emu.sac.command import run_command
    from emu.sac.run_plan import RunOptions

    with ending_by_exception():
        run_command(RunOptions(**options))
