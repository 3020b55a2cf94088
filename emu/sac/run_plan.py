"""What `emu run` will do: its options, and the plan that a pure function makes of them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from emu import __version__
from emu.errors import UserError
from emu.provision.process import boot_id, identify
from emu.provision.spec import MAX_DEVICES
from emu.sac.designs import parse_designs
from emu.sac.plan import (
    RunSpec,
    blocks_needed,
    check_devices,
    check_hbm,
    copy_bytes_needed,
    device_bytes_needed,
    place,
)
from emu.timing.pace import check_dilation
from emu.timing.profile_file import DEFAULT_SYSTEM, load_system
from emu.trace.generate import GenerateOptions, generate
from emu.trace.read import read_trace
from emu.trace.shape import fit_outputs, shape

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from emu.provision.testbed import Testbed
    from emu.sac.designs import Design
    from emu.sac.plan import RequestPlan
    from emu.sac.row_format import KVDtype
    from emu.timing.profile import SystemProfile
    from emu.trace.request import Request

DEFAULT_GPUS = 4
"""Decode GPUs unless asked otherwise, and never more than the profile has.

The default 8 requests in flight are then batches of two. sac-server's 8 GPUs would decode one request each, and a
batch of one misses so few rows that rdma-gather, whose message costs more set-up, comes out behind rdma-sparse.
"""
DEFAULT_OUTPUT_TOKENS = 16
"""Of the generated trace: its own lengths have a median of 350, and a first look should take a moment."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `emu run`, by the names that click gives them; None where the user said nothing.

    Attributes:
        backend: designs, comma-separated, or "all".
        trace_path, requests, context, output_tokens, skip_bad: which requests.
        name, directory: the testbed, or where an ephemeral one is made.
        out: directory for files.
        dry_run, as_json: what to print.
        round_, time_mode and the others: as in RunSpec.
    """

    backend: str
    model: str
    kv_dtype: KVDtype
    top_k: int | None
    hot_buffer: int | None
    gpus: int | None
    devices: int | None
    placement: str
    round_: int
    concurrency: int
    arrivals: str
    trace_path: Path | None
    requests: int
    context: int
    output_tokens: int | None
    skip_bad: bool
    hbm_bytes: int
    time_mode: str
    dilation: float
    profile: str | None
    seed: int
    name: str | None
    directory: Path | None
    out: Path | None
    dry_run: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Which trace a run's requests come from.

    Attributes:
        name: of the file, without its directory; "generated" for the one that the seed gives.
        sha256: of the file, hexadecimal; None for a generated one.
        skipped_lines: malformed lines that were skipped.
    """

    name: str
    sha256: str | None
    skipped_lines: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A whole run, before anything is started.

    Attributes:
        spec, designs, requests, trace: what runs.
        context: the most tokens of a prompt and its output.
        profile: the modelled system.
        notes: what the user should know of the choices made, a line each.
        device_bytes: size that the fullest CXL device needs.
        pool_bytes: size that one pool of all requests needs.
        copy_bytes: host DRAM for the copies of a prefetching design.
    """

    spec: RunSpec
    designs: tuple[Design, ...]
    requests: tuple[RequestPlan, ...]
    trace: TraceFacts
    context: int
    profile: SystemProfile
    notes: tuple[str, ...]
    device_bytes: int
    pool_bytes: int
    copy_bytes: int

    def facts(self) -> dict[str, Any]:
        """Everything that decides the figures, as the "spec" of each run: the same on every machine."""
        config = self.spec.config()
        outputs = [plan.request.output_tokens for plan in self.requests]
        return {
            **asdict(self.spec),
            "top_k": config.top_k,
            "hot_buffer": config.hot_buffer,
            "profile": self.profile.name,
            "trace": {"name": self.trace.name, "sha256": self.trace.sha256},
            "requests": len(self.requests),
            "context": self.context,
            "prompt_tokens_max": max(plan.request.input_tokens for plan in self.requests),
            "output_tokens_range": [min(outputs), max(outputs)],
            "emu_version": __version__,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data, for --dry-run."""
        return {
            "spec": self.facts(),
            "designs": [design.name for design in self.designs],
            "requests": [
                {
                    "number": r.number,
                    "gpu": r.gpu,
                    "device": r.device,
                    "input_tokens": r.request.input_tokens,
                    "output_tokens": r.request.output_tokens,
                }
                for r in self.requests
            ],
            "skipped_lines": self.trace.skipped_lines,
            "notes": list(self.notes),
            "device_bytes": self.device_bytes,
            "pool_bytes": self.pool_bytes,
            "copy_bytes": self.copy_bytes,
        }


def make_plan(options: RunOptions, found: Testbed | None) -> RunPlan:
    """The plan of a run: pure, but for reading profile and trace.

    Args:
        options: what the user asked for.
        found: the testbed that it will run on; None where one is made to measure.

    Raises:
        UserError: options, trace or sizes that cannot be right.
    """
    name = options.profile or (DEFAULT_SYSTEM if found is None else found.profile)
    profile = load_system(name)
    spec = _spec(options, name, profile, found)
    if spec.time == "paced":
        check_dilation(spec.dilation)
    designs = parse_designs(options.backend)
    requests, trace = _requests(spec, options)
    plans = place(requests, spec, _run_name())
    layout = spec.config().layout(spec.kv_dtype)
    check_hbm(plans, designs, spec, layout)
    blocks = blocks_needed(plans, spec, layout, spec.devices)
    if found is not None and any(design.scheme == "cxl" for design in designs):
        sizes = [device.size_bytes for device in found.record.devices]
        check_devices(blocks, layout, sizes[: spec.devices])
    return RunPlan(
        spec=spec,
        designs=designs,
        requests=tuple(plans),
        trace=trace,
        context=options.context,
        profile=profile,
        notes=tuple(_notes(spec, profile)),
        device_bytes=device_bytes_needed(blocks, layout),
        pool_bytes=device_bytes_needed(blocks_needed(plans, spec, layout, 1), layout),
        copy_bytes=copy_bytes_needed(plans, spec, layout),
    )


def _spec(options: RunOptions, name: str, profile: SystemProfile, found: Testbed | None) -> RunSpec:
    """What was asked for; where nothing was, the profile's own counts and the testbed's own devices."""
    if found is None:
        available = min(int(profile.devices.value), MAX_DEVICES)
    else:
        available = len(found.devices)
    devices = options.devices or available
    if found is not None and devices > available:
        raise UserError(
            f"{devices} devices asked for, testbed {found.name!r} has {available}",
            remedy=f"use --devices {available} or less, or a testbed with more",
        )
    return RunSpec(
        model=options.model,
        kv_dtype=options.kv_dtype,
        top_k=options.top_k or 0,
        hot_buffer=options.hot_buffer or 0,
        gpus=options.gpus or min(DEFAULT_GPUS, int(profile.gpus.value)),
        devices=devices,
        placement=options.placement,
        round=options.round_,
        concurrency=options.concurrency,
        arrivals=options.arrivals,
        hbm_bytes=options.hbm_bytes,
        profile=name,
        time=options.time_mode,
        dilation=options.dilation,
        seed=options.seed,
    )


def _notes(spec: RunSpec, profile: SystemProfile) -> list[str]:
    """Where the run models more than the profile's server has."""
    counts = {
        "GPUs": (spec.gpus, int(profile.gpus.value)),
        "devices": (spec.devices, int(profile.devices.value)),
    }
    return [
        f"{asked} {what} are modelled, {profile.name} has {own}: their links are added, the shared ones stay as they are"
        for what, (asked, own) in counts.items()
        if asked > own
    ]


def _run_name() -> str:
    """This process, among all that use the same pool now, did so before, or will."""
    own = identify(os.getpid())
    assert own is not None
    return f"{boot_id()[:8]}-{own.pid}-{own.start_time}"


def _requests(spec: RunSpec, options: RunOptions) -> tuple[list[Request], TraceFacts]:
    """The requests of the trace, cut to size, and which trace it is."""
    context, output_tokens = options.context, options.output_tokens
    if output_tokens is None and options.trace_path is None:
        output_tokens = DEFAULT_OUTPUT_TOKENS
    if output_tokens is not None and output_tokens > context - 2:
        raise UserError(
            f"{output_tokens} output tokens leave no prompt in a context of {context}",
            remedy=f"use --context {output_tokens + 2} or more, or fewer --output-tokens",
        )
    longest = spec.config().max_context
    if context > longest:
        raise UserError(
            f"a context of {context} is beyond the {longest} of model {spec.model}",
            remedy=f"use --context {longest} or less, or --model small",
        )
    path = options.trace_path
    if path is None:
        trace: Sequence[Request] = generate(
            GenerateOptions(requests=options.requests, seed=spec.seed)
        )
        facts = TraceFacts("generated", None, 0)
    else:
        read = read_trace(path, limit=options.requests, skip_bad=options.skip_bad)
        trace, facts = read.requests, TraceFacts(path.name, read.sha256, len(read.skipped))
    fitting = fit_outputs(trace, context)
    shaped = shape(fitting, context=context, output_tokens=output_tokens, limit=options.requests)
    return shaped, facts
