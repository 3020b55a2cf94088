"""What `emu sim` does: options to a setting, designs simulated, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.errors import UserError
from emu.locality.model import LocalityModel
from emu.sac.plan import RunSpec
from emu.sim.figures import figures
from emu.sim.models import check_context, check_top_k, model_shape
from emu.sim.simulate import SimSpec, simulate
from emu.sim.workload import Workload
from emu.timing.profile_file import load_system
from emu.trace.read import read_trace
from emu.trace.shape import shape as shape_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from emu.sac.designs import Design
    from emu.sim.models import ModelShape


def run_designs(
    spec: SimSpec, workload: Workload, designs: Sequence[Design], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Simulate every design; the entries of "runs".

    Raises:
        UserError: a request that no GPU, or the host, can hold.
    """
    runs = []
    for design in designs:
        progress(f"simulate {design.name}")
        runs.append(run_design(spec, design, workload))
    return runs


def run_design(spec: SimSpec, design: Design, workload: Workload) -> dict[str, Any]:
    """One entry of "runs"."""
    return figures(spec, design, simulate(spec, design, workload.requests), workload.measured)


def setting(options: dict[str, Any]) -> tuple[SimSpec, Workload]:
    """The setting and the requests that the options mean.

    Raises:
        UserError: what cannot be right.
    """
    shape = model_shape(options["model"])
    check_top_k(options["top_k"], options["context"])
    top_k = options["top_k"] or shape.top_k
    hot_buffer = options["hot_buffer"] or 2 * top_k
    if hot_buffer < top_k:
        raise UserError(
            f"a hot buffer of {hot_buffer} slots cannot hold the top {top_k} rows",
            remedy=f"give --hot-buffer {top_k} or more",
        )
    if options["host_bytes"] == 0:
        raise UserError("--host-bytes 0", remedy="leave it out for no limit")
    workload = _workload(options, shape)
    steady = options["steady"]
    run = RunSpec(
        model=shape.name,
        kv_dtype=options["kv_dtype"],
        top_k=top_k,
        hot_buffer=hot_buffer,
        gpus=options["gpus"] * options["servers"],
        devices=options["devices"],
        placement=options["placement"],
        round=options["round_"],
        concurrency=options["concurrency"],
        arrivals=options["arrivals"],
        hbm_bytes=options["hbm_bytes"],
        profile=options["profile"],
        seed=options["seed"],
    )
    spec = SimSpec(
        run,
        shape,
        servers=options["servers"],
        host_bytes=options["host_bytes"] or 0,
        index_prefetch=options["index_prefetch"],
        prefetch_stalls=options["prefetch_stalls"],
        locality=LocalityModel(),
        policy=options["policy"],
        stop_after=workload.measured[1] if steady else 0,
    )
    return spec, workload


def notes(spec: SimSpec, designs: Sequence[Design]) -> list[str]:
    """What the user should know of the choices made, a line each."""
    profile, run = load_system(spec.run.profile), spec.run
    found = []
    if run.gpus > profile.gpus.value * spec.servers:
        found.append(f"{profile.name} has {profile.gpus.value:g} GPUs, more are modelled")
    if run.devices > profile.devices.value:
        found.append(f"{profile.name} has {profile.devices.value:g} CXL devices, more are modelled")
    if not spec.prefetch_stalls and any(design.prefetch_path for design in designs):
        found.append(
            "decode goes on while a request is prefetched over RDMA; SAC's figures need --prefetch-stalls"
        )
    return found


def _workload(options: dict[str, Any], shape: ModelShape) -> Workload:
    context, output = options["context"], options["output_tokens"]
    check_context(shape, context)
    if output > context - 2:
        raise UserError(
            f"{output} output tokens leave no prompt in a context of {context}",
            remedy=f"use --context {output + 2} or more, or fewer --output-tokens",
        )
    for name, option in (("trace_path", "--trace"), ("requests", "--requests")):
        if options["steady"] and options[name] is not None:
            raise UserError(
                "--steady makes its own requests", remedy=f"leave {option} or --steady out"
            )
    if options["trace_path"] is not None:
        read = read_trace(
            options["trace_path"], limit=options["requests"], skip_bad=options["skip_bad"]
        )
        requests = shape_trace(read.requests, context=context, output_tokens=output)
        return Workload(tuple(requests), (0, len(requests)))
    if options["arrivals"] == "trace":
        raise UserError("arrivals of a trace, but no trace", remedy="give --trace FILE")
    prompt = context - output
    if options["steady"]:
        return Workload.steady(options["concurrency"], prompt, output, options["seed"])
    return Workload.burst(options["requests"] or options["concurrency"], prompt, output)
