"""What a record and the machine say together: is the testbed up, what remains of it, what is missing."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.errors import TestbedError
from emu.provision import process
from emu.provision.steps import (
    AllocateDevice,
    MakeDirectory,
    MakeFile,
    MakeScratch,
    StartGuest,
    StartProcess,
)
from emu.provision.undo import draft_path, owns_run_dir, running

if TYPE_CHECKING:
    from emu.provision.state import Record, StateDirectory

REMEDY_STATES = {"incomplete", "rebooted", "damaged", "abandoned", "unreadable"}
"""States in which only `emu down` helps."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A testbed as it is found.

    Attributes:
        name: its name.
        state: "up"; "changing" (an emu works on it now); "incomplete" (an up or a down was cut short);
            "rebooted" (the machine was, since); "damaged" (something of it is missing); "abandoned" (its owner
            ended without taking it down); "unreadable" (its record is).
        record: what up recorded, None when unreadable.
        processes: those that run, with pid, role and host.
        remains: files and directories of it that are there.
        missing: what should be there and is not.
        problem: why the record is unreadable.
    """

    name: str
    state: str
    record: Record | None
    processes: tuple[dict[str, Any], ...] = ()
    remains: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without the record's inner book-keeping."""
        found: dict[str, Any] = {"name": self.name, "state": self.state}
        if self.record is not None:
            record = self.record
            found |= {
                "driver": record.driver,
                "run_dir": record.run_dir,
                "hosts": list(record.hosts),
                "coherence": record.coherence,
                "profile": record.profile,
                "devices": [asdict(device) for device in record.devices],
                "node_socket": record.node_socket,
            }
        rest = {"processes": list(self.processes), "remains": list(self.remains)}
        return {**found, **rest, "missing": list(self.missing), "problem": self.problem}


def inspect(state: StateDirectory, name: str) -> Condition:
    """The condition of a recorded testbed.

    Raises:
        TestbedError: no testbed of that name.
    """
    try:
        record = state.load(name)
    except TestbedError as error:
        if not state.record_path(name).exists():
            raise
        return Condition(name, "unreadable", None, problem=str(error))
    remains, missing = _files(record)
    processes = _processes(record)
    alive = {row["role"] for row in processes if not row["host"]}
    for entry in record.steps:
        if (
            isinstance(entry.step, (StartProcess, StartGuest))
            and entry.done
            and entry.step.role not in alive
        ):
            missing.append(f"process {entry.step.role}")
    missing += [d.path for d in record.devices if d.existing and not os.path.lexists(d.path)]
    found = _state(record, missing, locked=state.is_locked(name))
    return Condition(name, found, record, tuple(processes), tuple(remains), tuple(missing))


def _state(record: Record, missing: list[str], *, locked: bool) -> str:
    if record.phase != "up":
        return "changing" if locked else "incomplete"
    if record.boot_id != process.boot_id():
        return "rebooted"
    if record.owner is not None and not process.is_running(record.owner):
        return "abandoned"
    return "damaged" if missing else "up"


def _files(record: Record) -> tuple[list[str], list[str]]:
    """(what is there, what is missing) of the files that up made."""
    remains, missing = [], []
    owned = owns_run_dir(record)
    for entry in record.steps:
        step = entry.step
        if not isinstance(step, (MakeDirectory, MakeFile, AllocateDevice, MakeScratch)):
            continue
        path = Path(step.path)
        draft = draft_path(path, record.id)
        if os.path.lexists(draft):
            remains.append(str(draft))
        if (
            owned
            and entry.made
            and os.path.lexists(path)
            and path.lstat().st_ino == entry.made.inode
        ):
            remains.append(str(path))
            if isinstance(step, MakeScratch):
                remains += sorted(str(left) for left in path.iterdir())
        elif entry.done:
            missing.append(str(path))
    return remains, missing


def _processes(record: Record) -> list[dict[str, Any]]:
    known = {entry.process: entry for entry in record.processes}
    rows = []
    for found in running(record):
        entry = known.get(found)
        role, host = (entry.role, entry.host) if entry else ("child of a recorded process", "?")
        rows.append({"pid": found.pid, "role": role, "host": host})
    return rows
