"""The record of what a testbed made: written before and after each step, so that down undoes exactly that."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.errors import TestbedError
from emu.guest.guest import Guest
from emu.provision.device_plan import Device
from emu.provision.process import ProcessId
from emu.provision.steps import Step, step_from_json, step_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class FileId:
    """A file that cannot be confused with another at the same path.

    Attributes:
        device: st_dev, meaningful within one boot.
        inode: st_ino.
    """

    device: int
    inode: int


@dataclass(slots=True)
class StepRecord:
    """One step of the plan and what came of it.

    Attributes:
        step: intended since the record exists.
        made: identity of the file or directory that it made, None before.
        done: it is complete.
    """

    step: Step
    made: FileId | None = None
    done: bool = False


@dataclass(slots=True)
class ProcessRecord:
    """One process that runs in the testbed.

    Attributes:
        process: its identity.
        role: what it is, for instance "memory-node" or the command of an exec.
        host: its host, "" for a process of the testbed itself.
    """

    process: ProcessId
    role: str
    host: str


@dataclass(slots=True)
class Record:
    """Everything that status, exec and down need to know about a testbed.

    Attributes:
        id: random; marks the run directory and the environment of every process as this testbed's.
        boot_id: the boot that the processes belong to.
        phase: "coming-up", "up" or "going-down".
        owner: the process whose end ends an ephemeral testbed, None for a lasting one.
        others: as in Plan.
    """

    id: str
    name: str
    boot_id: str
    phase: str
    driver: str
    reason: str
    run_dir: str
    hosts: tuple[str, ...]
    coherence: str
    profile: str
    devices: tuple[Device, ...]
    node_socket: str | None
    guests: tuple[Guest, ...]
    owner: ProcessId | None
    steps: list[StepRecord] = field(default_factory=list)
    processes: list[ProcessRecord] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        raw = {**asdict(self), "schema_version": SCHEMA_VERSION}
        for entry, step in zip(raw["steps"], self.steps, strict=True):
            entry["step"] = step_to_json(step.step)
        return raw

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Record:
        """The record that to_json wrote.

        Raises:
            KeyError, TypeError, ValueError: it did not.
        """
        if raw.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError("of another version of emu")
        raw["hosts"] = tuple(raw["hosts"])
        raw["devices"] = tuple(Device(**device) for device in raw["devices"])
        for guest in raw["guests"]:
            guest["devices"] = tuple(guest["devices"])
            guest["device_bytes"] = tuple(guest["device_bytes"])
        raw["guests"] = tuple(Guest(**guest) for guest in raw["guests"])
        raw["owner"] = raw["owner"] and ProcessId(**raw["owner"])
        raw["steps"] = [
            StepRecord(step_from_json(s["step"]), s["made"] and FileId(**s["made"]), s["done"])
            for s in raw["steps"]
        ]
        raw["processes"] = [
            ProcessRecord(ProcessId(**p["process"]), p["role"], p["host"]) for p in raw["processes"]
        ]
        return cls(**raw)


class StateDirectory:
    """The records of this user's testbeds, one JSON file each.

    Args:
        path: where; None means $XDG_STATE_HOME/emu/testbeds, by default ~/.local/state/emu/testbeds.
    """

    def __init__(self, path: Path | None = None) -> None:
        home = os.environ.get("XDG_STATE_HOME", "")
        base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
        self.path = path or base / "emu" / "testbeds"

    def record_path(self, name: str) -> Path:
        """The file of that testbed's record."""
        return self.path / f"{name}.json"

    def names(self) -> list[str]:
        """Names of all recorded testbeds, sorted."""
        return sorted(entry.name.removesuffix(".json") for entry in self.path.glob("*.json"))

    def testbeds(self) -> dict[str, tuple[str, ...]]:
        """Names of all recorded testbeds, each with the paths of its devices (none where its record is unreadable)."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.names():
            try:
                found[name] = tuple(device.path for device in self.load(name).devices)
            except TestbedError:
                found[name] = ()
        return found

    def load(self, name: str) -> Record:
        """The record of that testbed.

        Raises:
            TestbedError: there is none, or it cannot be read.
        """
        path = self.record_path(name)
        try:
            return Record.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            names = ", ".join(self.names())
            raise TestbedError(
                f"no testbed {name!r}",
                name=name,
                remedy=f"there are {names}" if names else "make one with `emu up --cxl-devices 4`",
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TestbedError(
                f"the record {path} cannot be read: {type(error).__name__}: {error}",
                name=name,
                remedy="remove by hand what it lists, then the record",
            ) from error

    def save(self, record: Record) -> None:
        """Replace the record atomically; on return it survives a crash of the machine.

        Raises:
            TestbedError: it cannot be written.
        """
        path = self.record_path(record.name)
        draft = path.with_suffix(".json.new")
        try:
            with draft.open("w") as file:
                json.dump(record.to_json(), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            self._sync_directory()
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise TestbedError(
                f"the record {path} cannot be written: {error.strerror}",
                name=record.name,
                remedy="set XDG_STATE_HOME to a writable directory with free space",
            ) from error

    def forget(self, name: str) -> None:
        """Remove the record: nothing of the testbed is left."""
        for suffix in (".json.new", ".json"):
            self.record_path(name).with_suffix(suffix).unlink(missing_ok=True)
        self._sync_directory()

    @contextmanager
    def lock(self, name: str, *, wait_s: float = 10.0) -> Iterator[None]:
        """Hold the testbed's lock; its file exists only while somebody holds it.

        Raises:
            TestbedError: another process holds it for longer than wait_s, or no lock file can be made here.
        """
        path = self.path / f"{name}.lock"
        fd = self._acquire(path, name, time.monotonic() + wait_s)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def is_locked(self, name: str) -> bool:
        """Whether somebody is changing this testbed now."""
        try:
            with (self.path / f"{name}.lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _acquire(self, path: Path, name: str, deadline: float) -> int:
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TestbedError(
                    f"{self.path} cannot be used: {error.strerror}",
                    name=name,
                    remedy="set XDG_STATE_HOME to a writable directory",
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(path) and os.path.samestat(os.fstat(fd), path.lstat()):
                    return fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise TestbedError(
                        f"testbed {name!r} is being changed by another emu",
                        name=name,
                        remedy="wait until that is done",
                    ) from None
                time.sleep(0.02)
            except FileNotFoundError:  # its last holder removed it between the two looks
                pass
            os.close(fd)

    def _sync_directory(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
