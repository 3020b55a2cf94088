"""What `emu run` does: a plan made, a testbed found or made, the designs run, the figures shown."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from emu import host_memory
from emu.errors import TestbedError, UserError, WorkerError
from emu.json_output import json_text
from emu.provision.condition import inspect
from emu.provision.facts import SHM, free_bytes
from emu.provision.testbed import Testbed, testbed
from emu.sac.media import Media
from emu.sac.memory import check_fits, peak_need
from emu.sac.progress import TerminalProgress
from emu.sac.report import (
    FULL_WIDTH,
    clear_results,
    footer,
    late_warning,
    pace_line,
    plan_lines,
    result_files,
    tables,
    write_files,
)
from emu.sac.run_plan import make_plan
from emu.sac.session import Session, Setting, work_units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu.sac.run_plan import RunOptions, RunPlan


def execute(plan: RunPlan, setting: Setting) -> list[dict[str, Any]]:
    """Run every design; the entries of "runs"."""
    progress = TerminalProgress(work_units(plan.requests, plan.designs))
    facts = plan.facts()
    with progress.shown(), Session(plan.spec, plan.requests, setting, progress) as session:
        return [{**session.run(design), "spec": facts} for design in plan.designs]


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
        _print(runs, plan, out)
    for note in plan.notes:
        sys.stderr.write(f"note: {note}\n")
    if warning := late_warning(runs):
        sys.stderr.write(f"warning: {warning}\n")
    for run in runs:
        if not (run["tokens_match"] and run["kv_bytes_match"]):
            raise WorkerError(
                f"{run['backend']} is not exact: {run['differences'][0]}",
                role="oracle",
                remedy="this is a defect of emu or of the medium: report it with the command",
            )


def _print(runs: list[dict[str, Any]], plan: RunPlan, out: Path | None) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=FULL_WIDTH)
    for each in tables(runs, console.width):
        console.print(each)
    lines = [*footer(runs), pace_line(runs)]
    if plan.trace.skipped_lines:
        lines.append(f"{plan.trace.skipped_lines} malformed lines of the trace were skipped")
    if out is not None:
        lines.append(f"written: {out}/runs.jsonl, comparison.png, ops-*.jsonl, selections-*.npz")
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)


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
    if found is not None:
        _refuse_damaged(found)
    plan = make_plan(options, found)
    if options.dry_run:
        _print_plan(plan, None if found is None else found.name, as_json=options.as_json)
        return
    _check_memory(plan, found, options.directory)
    with _on(found, plan, options.directory) as bed, bed.workspace() as workspace:
        media = Media(
            devices=[Path(path) for path in bed.devices[: plan.spec.devices]],
            workspace=workspace,
            pool_bytes=plan.pool_bytes,
            copy_bytes=plan.copy_bytes,
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            clear_results(out)
        runs = execute(plan, Setting(media, bed, out))
    show(runs, plan, out, as_json=options.as_json)


def _check_memory(plan: RunPlan, found: Testbed | None, directory: Path | None) -> None:
    made = plan.device_bytes * plan.spec.devices if found is None else 0
    need = peak_need(plan.designs, made, plan.pool_bytes, plan.copy_bytes)
    place = (directory or SHM) if found is None else Path(found.run_dir)
    check_fits(need, fs_free_bytes=free_bytes(place), memory_free_bytes=host_memory.free_bytes())


def _print_plan(plan: RunPlan, testbed_name: str | None, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json_text({"testbed": testbed_name, **plan.to_json()}) + "\n")
        return
    for line in plan_lines(plan.to_json(), testbed_name):
        sys.stdout.write(line + "\n")


def _refuse_damaged(found: Testbed) -> None:
    """Before anything is computed: a run on what is left of a testbed fails late, or says nothing.

    Raises:
        TestbedError: what is missing or changed.
    """
    condition = inspect(found.state, found.name)
    if condition.state != "up":
        raise TestbedError(
            f"testbed {found.name!r} is {condition.state}: {', '.join(condition.faults) or 'it changes'}",
            name=found.name,
            remedy=f"clear it with `emu down {found.name}`, then `emu up` again",
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
    for path in result_files(out):
        if path.is_dir():
            raise UserError(f"--out {out}: {path} is a directory", remedy="name another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"--out {out}: no permission to write in {existing}", remedy="name another directory"
        )
    return out
