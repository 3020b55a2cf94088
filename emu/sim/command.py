"""What `emu sim` does: options to a setting, designs simulated, figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.errors import UserError
from emu.locality.model import LocalityModel
from emu.sac.designs import parse_designs
from emu.sac.plan import RunSpec
from emu.sim.figures import figures
from emu.sim.models import model_shape
from emu.sim.simulate import SimSpec, simulate
from emu.sim.workload import Workload
from emu.trace.read import read_trace
from emu.trace.shape import shape as shape_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.sac.designs import Design
    from emu.sim.models import ModelShape


def run_designs(
    options: dict[str, Any], progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Simulate every design of the options; the entries of "runs".

    Raises:
        UserError: options or a trace that cannot be right.
    """
    designs = parse_designs(options["backend"])
    spec, workload = setting(options)
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
    top_k = options["top_k"] or shape.top_k
    hot_buffer = options["hot_buffer"] or 2 * top_k
    if hot_buffer < top_k:
        raise UserError(
            f"a hot buffer of {hot_buffer} slots cannot hold the top {top_k} rows",
            remedy=f"give --hot-buffer {top_k} or more",
        )
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


def _workload(options: dict[str, Any], shape: ModelShape) -> Workload:
    context, output = options["context"], options["output_tokens"]
    if context > shape.max_context:
        raise UserError(
            f"a context of {context} is beyond the {shape.max_context} of model {shape.name}",
            remedy=f"use --context {shape.max_context} or less",
        )
    if output > context - 2:
        raise UserError(
            f"{output} output tokens leave no prompt in a context of {context}",
            remedy=f"use --context {output + 2} or more, or fewer --output-tokens",
        )
    if options["trace_path"] is not None:
        if options["steady"]:
            raise UserError(
                "--steady makes its own requests", remedy="leave --trace or --steady out"
            )
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
