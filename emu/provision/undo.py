"""Undoes what a record says, in reverse, and nothing else: by recorded identity, never by pattern."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from emu.provision import native_rdma, process
from emu.provision.steps import (
    DIRECTORY_SUFFIXES,
    AddRdmaLink,
    AllocateDevice,
    AttachDevice,
    MakeDirectory,
    MakeFile,
    MakeRoot,
    MakeScratch,
    StartProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from emu.provision.process import ProcessId
    from emu.provision.state import Record, StepRecord

MARKER = ".emu-testbed"
"""File in a run directory that holds its testbed's id: proof, also after a reboot, that it is ours."""


@dataclass(slots=True)
class Undone:
    """What down did.

    Attributes:
        removed: files and directories removed.
        ended: processes ended.
        left: what lies or runs there that the testbed did not make, each with the reason.
        failed: what is the testbed's and could not be removed, each with the reason.
    """

    removed: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def draft_path(path: Path, testbed_id: str) -> Path:
    """Where a file is made before it gets its name: the random id in it says that it is ours."""
    return path.with_name(f".{path.name}.{testbed_id}")


def running(record: Record) -> list[ProcessId]:
    """Every process of the testbed that runs: the recorded ones of this boot, and those that carry its id."""
    found = process.tagged(record.id)
    if record.boot_id == process.boot_id():
        recorded = [entry.process for entry in record.processes]
        found += [p for p in recorded if p not in found and process.is_running(p)]
    return found


def undo(record: Record, progress: Callable[[str], None]) -> Undone:
    """End the testbed's processes, then remove what its steps made, the last first. May be repeated."""
    undone = Undone()
    _end_processes(record, undone)
    if undone.failed:
        return undone
    undone.left += [
        f"process {pid} still maps files of {record.run_dir}; emu did not start it"
        for pid in process.mapping(Path(record.run_dir))
    ]
    owned = owns_run_dir(record)
    for entry in reversed(record.steps):
        progress(f"undo: {entry.step}")
        try:
            _undo_step(record, entry, owned, undone)
        except OSError as error:
            undone.failed.append(f"{error.filename}: {error.strerror}")
    return undone


def _end_processes(record: Record, undone: Undone) -> None:
    """Those of the hosts first, then the testbed's own, the last started first."""
    own = {entry.process for entry in record.processes if not entry.host}
    for _ in range(10):  # a process that ends may have started another meanwhile
        alive = running(record)
        batch = [p for p in alive if p not in own] or alive[::-1]
        survivors = process.terminate(batch)
        undone.ended += [p.pid for p in batch if p not in survivors]
        if survivors or not batch:
            undone.failed += [f"process {p.pid} does not end" for p in survivors]
            return
    undone.failed.append("its processes start others faster than they end")


def owns_run_dir(record: Record) -> bool:
    """Whether the run directory is the very one that this testbed made."""
    path = Path(record.run_dir)
    made = [e.made for e in record.steps if isinstance(e.step, MakeDirectory) and e.made]
    try:
        found = path.lstat()
    except OSError:
        return False
    if not made or not stat.S_ISDIR(found.st_mode) or found.st_ino != made[0].inode:
        return False
    if record.boot_id == process.boot_id() and found.st_dev == made[0].device:
        return True
    try:
        return (path / MARKER).read_text() == record.id
    except (OSError, UnicodeDecodeError):
        return False


def _undo_step(record: Record, entry: StepRecord, owned: bool, undone: Undone) -> None:
    step = entry.step
    match step:
        case MakeRoot():
            _remove_root(Path(step.path))
        case MakeDirectory():
            _remove_directory(record, Path(step.path), owned, undone)
        case MakeFile() | AllocateDevice() if owned:
            path = Path(step.path)
            _unlink(draft_path(path, record.id), undone)
            _remove_made(path, entry, undone)
            if isinstance(step, AllocateDevice):
                _remove_companions(path, undone)
        case AttachDevice() if entry.done and not step.has_directory:
            _release(Path(step.path), undone)
        case MakeScratch() if owned:
            path = Path(step.path)
            with suppress(FileNotFoundError):
                draft_path(path, record.id).rmdir()
            _remove_scratch(path, entry, undone)
        case StartProcess() if owned:
            for created in map(Path, step.creates):
                _remove_made(created, entry, undone)
                _remove_companions(created, undone)
        case AddRdmaLink() if entry.made and record.boot_id == process.boot_id():
            undone.removed += [step.device] if native_rdma.remove(step) else []
        case _:
            pass


def _release(device: Path, undone: Undone) -> None:
    """Remove the directory that stores made beside an attached device, unless somebody still has that pool open."""
    pids = process.mapping(device)
    if pids:
        undone.left.append(f"{device}: process {pids[0]} still maps it; emu did not start it")
    else:
        _remove_companions(device, undone)


def _remove_root(path: Path) -> None:
    """Remove the default root if it is empty: other testbeds may live in it."""
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _remove_directory(record: Record, path: Path, owned: bool, undone: Undone) -> None:
    """The run directory goes back to its draft name first, so that a kill in between loses no proof."""
    draft = draft_path(path, record.id)
    if owned:
        foreign = sorted(entry for entry in path.iterdir() if entry.name != MARKER)
        if foreign:
            undone.left += [f"{entry}: emu did not make it" for entry in foreign]
            (path / MARKER).unlink(missing_ok=True)
            return
        path.rename(draft)
        undone.removed.append(str(path))
    elif os.path.lexists(path):
        undone.left.append(f"{path}: not the directory that up made")
    (draft / MARKER).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        draft.rmdir()


def _remove_made(path: Path, entry: StepRecord, undone: Undone) -> None:
    """Remove the file at this path of our own run directory if it is the one that the step made."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if isinstance(entry.step, StartProcess) and entry.made is None:
        ours = stat.S_ISSOCK(found.st_mode)  # killed between its birth and the record of it
    else:
        ours = entry.made is not None and entry.made.inode == found.st_ino
    if ours and not stat.S_ISDIR(found.st_mode):
        _unlink(path, undone)


def _remove_scratch(path: Path, entry: StepRecord, undone: Undone) -> None:
    """Remove the directory of the runs with everything in it, if it is the one that the step made."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if (
            entry.made is not None
            and entry.made.inode == found.st_ino
            and stat.S_ISDIR(found.st_mode)
        ):
            shutil.rmtree(path)
            undone.removed.append(str(path))


def _remove_companions(path: Path, undone: Undone) -> None:
    for suffix in DIRECTORY_SUFFIXES:
        companion = path.with_name(path.name + suffix)
        with suppress(FileNotFoundError):
            if stat.S_ISREG(companion.lstat().st_mode):
                _unlink(companion, undone)


def _unlink(path: Path, undone: Undone) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
        undone.removed.append(str(path))
