"""What `emu run` does: options to a plan, a testbed found or made, the designs run, the figures shown."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from emu import host_memory
from emu.errors import UserError, WorkerError
from emu.json_output import json_text
from emu.provision.facts import SHM, free_bytes
from emu.provision.process import boot_id, identify
from emu.provision.testbed import Testbed, testbed
from emu.sac.designs import parse_designs
from emu.sac.media import Media
from emu.sac.memory import check_fits, peak_need
from emu.sac.plan import (
    RunSpec,
    blocks_needed,
    check_devices,
    check_hbm,
    copy_bytes_needed,
    device_bytes_needed,
    place,
)
from emu.sac.progress import TerminalProgress
from emu.sac.report import FILES, FULL_WIDTH, table, write_files
from emu.sac.session import Session, Setting, work_units
from emu.timing.profile import DEFAULT_SYSTEM
from emu.timing.system import System
from emu.trace.generate import GenerateOptions, generate
from emu.trace.read import read_trace
from emu.trace.shape import shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from emu.sac.designs import Design
    from emu.sac.plan import RequestPlan
    from emu.sac.row_format import KVDtype
    from emu.trace.request import Request

DEFAULT_DEVICES = 4


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
    gpus: int
    devices: int | None
    placement: str
    round_: int
    concurrency: int
    arrivals: str
    trace_path: Path | None
    requests: int
    context: int
    output_tokens: int
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
class RunPlan:
    """A whole run, before anything is started.

    Attributes:
        spec, designs, requests: what runs.
        skipped_lines: malformed lines of the trace that were skipped.
        device_bytes: size that the fullest CXL device needs.
        pool_bytes: size that one pool of all requests needs.
        copy_bytes: host DRAM for the copies of a prefetching design.
    """

    spec: RunSpec
    designs: tuple[Design, ...]
    requests: tuple[RequestPlan, ...]
    skipped_lines: int
    device_bytes: int
    pool_bytes: int
    copy_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain data, for --dry-run."""
        return {
            "spec": asdict(self.spec),
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
            "skipped_lines": self.skipped_lines,
            "device_bytes": self.device_bytes,
            "pool_bytes": self.pool_bytes,
            "copy_bytes": self.copy_bytes,
        }


def make_plan(spec: RunSpec, options: RunOptions, device_sizes: Sequence[int] | None) -> RunPlan:
    """The plan of a run: pure, but for reading the trace.

    Args:
        spec: what decides the results.
        options: which designs and requests.
        device_sizes: of the testbed's devices; None where they will be made to measure.

    Raises:
        UserError: options, trace or sizes that cannot be right.
    """
    System.load(spec.profile, gpus=spec.gpus, devices=spec.devices)
    designs = parse_designs(options.backend)
    requests, skipped = _requests(spec, options)
    plans = place(requests, spec, _run_name())
    layout = spec.config().layout(spec.kv_dtype)
    check_hbm(plans, designs, spec, layout)
    blocks = blocks_needed(plans, spec, layout, spec.devices)
    if device_sizes is not None and any(design.scheme == "cxl" for design in designs):
        check_devices(blocks, layout, device_sizes[: spec.devices])
    return RunPlan(
        spec=spec,
        designs=designs,
        requests=tuple(plans),
        skipped_lines=skipped,
        device_bytes=device_bytes_needed(blocks, layout),
        pool_bytes=device_bytes_needed(blocks_needed(plans, spec, layout, 1), layout),
        copy_bytes=copy_bytes_needed(plans, spec, layout),
    )


def _run_name() -> str:
    """This process, among all that use the same pool now, did so before, or will."""
    own = identify(os.getpid())
    assert own is not None
    return f"{boot_id()[:8]}-{own.pid}-{own.start_time}"


def _requests(spec: RunSpec, options: RunOptions) -> tuple[list[Request], int]:
    """The requests of the trace, cut to size, and how many lines were skipped."""
    context, output_tokens = options.context, options.output_tokens
    if output_tokens > context - 2:
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
        skipped = 0
    else:
        read = read_trace(path, limit=options.requests, skip_bad=options.skip_bad)
        trace, skipped = read.requests, len(read.skipped)
    return shape(
        trace, context=context, output_tokens=output_tokens, limit=options.requests
    ), skipped


def execute(plan: RunPlan, setting: Setting) -> list[dict[str, Any]]:
    """Run every design; the entries of "runs"."""
    progress = TerminalProgress(work_units(plan.requests, plan.designs))
    with progress.shown(), Session(plan.spec, plan.requests, setting, progress) as session:
        return [session.run(design) for design in plan.designs]


def show(runs: list[dict[str, Any]], plan: RunPlan, out: Path | None, *, as_json: bool) -> None:
    """Print the figures, write the files, and fail if a design was not exact.

    Raises:
        WorkerError: a design differs from the in-memory run.
    """
    if out is not None:
        write_files(runs, out)
    if as_json:
        sys.stdout.write(json_text({"runs": runs}) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=FULL_WIDTH)
        console.print(table(runs, console.width))
        outputs = sorted({r.request.output_tokens for r in plan.requests})
        longest = max(r.request.input_tokens for r in plan.requests)
        console.print(
            f"{len(plan.requests)} requests, prompts of up to {longest} tokens, {outputs[0]} to {outputs[-1]} output "
            "tokens (--requests, --context, --output-tokens)"
        )
        if plan.skipped_lines:
            console.print(f"{plan.skipped_lines} malformed lines of the trace were skipped")
        if out is not None:
            console.print(f"written: {out}/runs.jsonl, comparison.png, ops-*.jsonl")
    for run in runs:
        if not (run["tokens_match"] and run["kv_bytes_match"]):
            raise WorkerError(
                f"{run['backend']} is not exact: {run['differences'][0]}",
                role="oracle",
                remedy="this is a defect of emu or of the medium: report it with the command",
            )


def run_command(options: RunOptions) -> None:
    """Carry out `emu run` with its options.

    Raises:
        EmuError: what was wrong, in one line.
    """
    out = _output_directory(options.out)
    found = Testbed.find_lasting(options.name)
    if found is not None and options.directory is not None:
        raise UserError(
            f"--dir is for a testbed that the run makes, and {found.name!r} is up",
            remedy="leave --dir out, or take the testbed down first",
        )
    spec = _spec(options, found)
    sizes = None if found is None else [size for _, size in found.regions]
    plan = make_plan(spec, options, sizes)
    if options.dry_run:
        where = None if found is None else found.name
        sys.stdout.write(json_text({"testbed": where, **plan.to_json()}) + "\n")
        return
    if found is not None and found.record.guests:
        _refuse_what_guests_lack(plan)
    _check_memory(plan, found, options.directory)
    with _on(found, plan, options.directory) as bed, bed.workspace() as workspace:
        media = Media(
            devices=[Path(path) for path, _ in bed.regions[: spec.devices]],
            workspace=workspace,
            pool_bytes=plan.pool_bytes,
            copy_bytes=plan.copy_bytes,
        )
        runs = execute(plan, Setting(media, bed, _make_directories(out)))
    show(runs, plan, out, as_json=options.as_json)


def _refuse_what_guests_lack(plan: RunPlan) -> None:
    """Raises: UserError: a design whose pool guests cannot share, or a clock that means nothing there."""
    for design in plan.designs:
        if design.scheme == "dram":
            raise UserError(
                f"backend {design.name} needs memory that the testbed's guests do not share",
                remedy="use --backend cxl,rdma, or a testbed of --driver local",
            )
    if plan.spec.time == "paced":
        raise UserError(
            "guests cannot pace: their own time is QEMU's", remedy="use --time virtual or off"
        )


def _check_memory(plan: RunPlan, found: Testbed | None, directory: Path | None) -> None:
    made = plan.device_bytes * plan.spec.devices if found is None else 0
    need = peak_need(plan.designs, made, plan.pool_bytes, plan.copy_bytes)
    place = (directory or SHM) if found is None else Path(found.run_dir)
    check_fits(need, fs_free_bytes=free_bytes(place), memory_free_bytes=host_memory.free_bytes())


def _spec(options: RunOptions, found: Testbed | None) -> RunSpec:
    available = DEFAULT_DEVICES if found is None else len(found.regions)
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
        gpus=options.gpus,
        devices=devices,
        placement=options.placement,
        round=options.round_,
        concurrency=options.concurrency,
        arrivals=options.arrivals,
        hbm_bytes=options.hbm_bytes,
        profile=options.profile or (DEFAULT_SYSTEM if found is None else found.profile),
        time=options.time_mode,
        dilation=options.dilation,
        seed=options.seed,
    )


@contextmanager
def _on(found: Testbed | None, plan: RunPlan, directory: Path | None) -> Iterator[Testbed]:
    """The testbed that was found, or an ephemeral local one, made to measure and removed."""
    if found is not None:
        yield found
        return
    with testbed(
        plan.spec.devices,
        directory=directory,
        driver="local",
        device_size=plan.device_bytes,
        profile=plan.spec.profile,
        rdma="off",
    ) as made:
        yield made


def _output_directory(out: Path | None) -> Path | None:
    """Refuse an --out that cannot be a directory, before anything is started.

    Raises:
        UserError: it, or something above it, is a file or cannot be written.
    """
    if out is None:
        return None
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if os.path.lexists(p))
    if not existing.is_dir():
        raise UserError(
            f"--out {out}: {existing} is a file, or leads nowhere", remedy="name a directory"
        )
    for name in FILES:
        if (out / name).is_dir():
            raise UserError(f"--out {out}: {out / name} is a directory", remedy="name another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"--out {out}: no permission to write in {existing}", remedy="name another directory"
        )
    return out


def _make_directories(out: Path | None) -> Path | None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    return out
