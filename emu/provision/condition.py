"""What a record and the machine say together: is the testbed up, what remains of it, what is missing."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.errors import TestbedError
from emu.provision import process
from emu.provision.facts import path_facts
from emu.provision.steps import AllocateDevice, MakeDirectory, MakeFile, MakeScratch, StartProcess
from emu.provision.undo import draft_path, owns_run_dir, running

if TYPE_CHECKING:
    from emu.provision.state import Record, StateDirectory

REMEDY_STATES = {"incomplete", "rebooted", "damaged", "abandoned", "unreadable"}
"""States in which only `emu down` helps."""


@dataclass(frozen=True, slots=True)
class Resized:
    """A device whose size is not what up recorded.

    Attributes:
        path: the device.
        recorded_bytes, found_bytes: its size then and now.
    """

    path: str
    recorded_bytes: int
    found_bytes: int

    def __str__(self) -> str:
        verb = "shrank" if self.found_bytes < self.recorded_bytes else "grew"
        return f"{self.path} {verb} from {self.recorded_bytes} to {self.found_bytes} bytes"


@dataclass(frozen=True, slots=True)
class Condition:
    """A testbed as it is found.

    Attributes:
        name: its name.
        state: "up"; "changing" (an emu works on it now); "incomplete" (an up or a down was cut short);
            "rebooted" (the machine was, since); "damaged" (something of it is missing, or a device has another size);
            "abandoned" (its owner ended without taking it down); "unreadable" (its record is).
        record: what up recorded, None when unreadable.
        processes: those that run, with pid, role and host.
        remains: files and directories of it that are there.
        missing: what should be there and is not.
        resized: devices that are not as large as they were made; an existing one may be larger than what is used.
        problem: why the record is unreadable.
    """

    name: str
    state: str
    record: Record | None
    processes: tuple[dict[str, Any], ...] = ()
    remains: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    resized: tuple[Resized, ...] = ()
    problem: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """What is missing or changed, a line each."""
        gone = (f"missing {what}" for what in self.missing)
        return (*gone, *(f"device {each}" for each in self.resized))

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
        rest |= {"missing": list(self.missing), "resized": [asdict(each) for each in self.resized]}
        return {**found, **rest, "problem": self.problem}


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
        if isinstance(entry.step, StartProcess) and entry.done and entry.step.role not in alive:
            missing.append(f"process {entry.step.role}")
    missing += [d.path for d in record.devices if d.existing and not _is_device(d.path)]
    if record.node_socket and "memory-node" in alive and not os.path.lexists(record.node_socket):
        missing.append(record.node_socket)
    resized = _resized(record)
    found = _state(record, damaged=bool(missing or resized), locked=state.is_locked(name))
    return Condition(
        name, found, record, tuple(processes), tuple(remains), tuple(missing), tuple(resized)
    )


def _resized(record: Record) -> list[Resized]:
    """Devices of another size; one that is gone, or no device any more, is for others to say."""
    found = []
    for device in record.devices:
        now_bytes = path_facts(Path(device.path)).size_bytes
        grew = now_bytes > device.size_bytes and not device.existing
        if _is_device(device.path) and (now_bytes < device.size_bytes or grew):
            found.append(Resized(device.path, device.size_bytes, now_bytes))
    return found


def _is_device(path: str) -> bool:
    return path_facts(Path(path)).kind in {"file", "devdax"}


def _state(record: Record, *, damaged: bool, locked: bool) -> str:
    if record.phase != "up":
        return "changing" if locked else "incomplete"
    if record.boot_id != process.boot_id():
        return "rebooted"
    if record.owner is not None and not process.is_running(record.owner):
        return "abandoned"
    return "damaged" if damaged else "up"


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
