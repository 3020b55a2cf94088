"""`emu sim`: serving at the papers' scale, in model time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from emu.cli.common import json_option, print_json, print_table, progress
from emu.cli.options import OUT_DIRECTORY, SIZE, make_directory
from emu.units import format_size


@click.command("sim")
@click.option(
    "--backend",
    default="all",
    show_default=True,
    help="Designs, comma-separated: cxl, rdma, rdma-sparse, rdma-gather, dram, hbm.",
)
@click.option(
    "--model",
    default="deepseek-v3.2",
    show_default=True,
    help="deepseek-v3.2, glm-5.1, glm-5.3, deepseek-v4, or a Hugging Face config.json.",
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
    help="Selected rows per layer and step [default: the model's].",
)
@click.option(
    "--hot-buffer",
    type=click.IntRange(1),
    help="Slots per request and layer [default: twice the top-k].",
)
@click.option(
    "--policy",
    type=click.Choice(["lru", "fifo", "random", "belady"]),
    default="lru",
    show_default=True,
    help="Replacement in the hot buffer; lru is HiSparse's.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Decode GPUs per server.",
)
@click.option(
    "--servers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Servers that share the pool's devices and switch.",
)
@click.option(
    "--devices", type=click.IntRange(1, 64), default=2, show_default=True, help="CXL devices."
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
    type=click.IntRange(1, 8192),
    default=64,
    show_default=True,
    help="Requests in flight over all GPUs.",
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
    help="Mooncake JSONL, Azure CSV or emu JSONL [default: requests that are all alike].",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="How many [default: the concurrency, or the whole trace].",
)
@click.option(
    "--steady",
    is_flag=True,
    help="Measure a steady state: requests in flight are at all stages of their output.",
)
@click.option(
    "--context",
    type=SIZE,
    default="129K",
    show_default=True,
    help="Prompt and output together, tokens.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Tokens to decode per request.",
)
@click.option("--skip-bad", is_flag=True, help="Skip and count malformed lines of the trace.")
@click.option(
    "--hbm-bytes",
    type=SIZE,
    default="60G",
    show_default=True,
    help="GPU memory for KV rows and index keys, per GPU.",
)
@click.option("--host-bytes", type=SIZE, help="DRAM of all hosts for KV [default: no limit].")
@click.option(
    "--index-prefetch",
    is_flag=True,
    help="Read ahead for layers that share a selection (HiSparse's exact prefetch).",
)
@click.option(
    "--prefetch-stalls",
    is_flag=True,
    help="The GPUs of a server step together, and not while one of their requests is prefetched over RDMA.",
)
@click.option(
    "--profile", default="sac-server", show_default=True, help="System profile, or a .toml file."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the selections."
)
@click.option("--out", type=OUT_DIRECTORY, help="Directory for runs.jsonl.")
@click.option("--dry-run", is_flag=True, help="Print what would be simulated, and stop.")
@json_option
def command(**options: Any) -> None:
    """Simulate prefill, pool reads and write-back at scale: the engine, profiles and rules of `emu run`."""
    from emu.sac.designs import parse_designs
    from emu.sim.command import notes, run_designs, setting

    if options["dry_run"]:
        _dry_run(options)
        return
    designs = parse_designs(options["backend"])
    spec, workload = setting(options)
    runs = run_designs(spec, workload, designs, progress)
    if options["out"] is not None:
        out = make_directory(options["out"])
        (out / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    if options["as_json"]:
        print_json({"runs": runs})
    else:
        _table(runs)
        for note in notes(spec, designs):
            click.echo(f"note: {note}")


def _dry_run(options: dict[str, Any]) -> None:
    from dataclasses import asdict

    from emu.sac.designs import parse_designs
    from emu.sim.command import setting

    spec, workload = setting(options)
    print_json(
        {
            "designs": [design.name for design in parse_designs(options["backend"])],
            "setting": asdict(spec),
            "requests": len(workload.requests),
            "measured": list(workload.measured),
        }
    )


def _table(runs: list[dict[str, Any]]) -> None:
    spec = runs[0]["spec"]
    click.echo(
        f"model time of {spec['profile']} (mode virtual): {spec['model']} ({spec['kv_dtype']}), round {spec['round']}, "
        f"{spec['arrivals']} arrivals,\n{spec['concurrency']} in flight on {spec['gpus']} GPUs, {spec['devices']} CXL "
        f"devices; top-k {spec['top_k']}, hot buffer {spec['hot_buffer']} ({spec['policy']});\n"
        f"prompts of {spec['prompt_tokens_mean']:,.0f} tokens, {spec['output_tokens_mean']:,.0f} output tokens; means"
    )
    rows = [
        (
            run["backend"],
            f"{run['throughput_tok_s']:,.0f}",
            *(
                _mean(run[name])
                for name in ("ttft_ms", "ttft_transfer_ms", "tbt_ms", "tbt_transfer_ms")
            ),
            "-" if run["miss_rate"] is None else f"{run['miss_rate']:.1%}",
            format_size(run["local_bytes_modelled"]),
            run["bound_by"],
        )
        for run in runs
    ]
    header = (
        "backend",
        "tok/s",
        "TTFT ms",
        "of it bytes",
        "TBT ms",
        "of it bytes",
        "misses",
        "local",
        "bound by",
    )
    print_table(header, rows)


def _mean(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['mean']:,.2f}"
