"""The testbeds of one pytest process: made when first asked for, shared by equal specs, taken down at its end."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emu.errors import EmuError, HostError, TestbedError, UserError
from emu.provision import process
from emu.provision.devices import devices_of
from emu.provision.runner import Runner
from emu.provision.spec import Flags, flags_of, make_spec
from emu.provision.state import StateDirectory
from emu.provision.steps import DIRECTORY_SUFFIXES, AllocateDevice, AttachDevice, StartProcess
from emu.provision.testbed import testbed as make_testbed
from emu.provision.undo import running
from emu.suggest import did_you_mean

if TYPE_CHECKING:
    from emu.provision.spec import TestbedSpec
    from emu.provision.state import Record
    from emu.provision.testbed import Testbed

PREFIX = "pytest-"
_KEYWORDS = ["spec_file", *(field.name for field in fields(Flags) if field.name != "name")]
_ZEROS = bytes(4 << 20)


@dataclass(slots=True)
class _Shared:
    """A testbed and what is known of its use.

    Attributes:
        testbed: it.
        life: closing it takes the testbed down.
        changed_ns: time of the record's last change when the test began: a program that it starts changes it.
        used: a test has had it.
    """

    testbed: Testbed
    life: ExitStack
    changed_ns: int = 0
    used: bool = False


class Testbeds:
    """What the fixtures take testbeds from.

    Args:
        worker: this process among the session's, for the names.
        directory: as that of `emu up --dir`.
    """

    __test__ = False  # not a test class, whatever its name says

    def __init__(self, worker: str, directory: Path | None) -> None:
        self._state = StateDirectory()  # now: tests may change the environment
        self._names = f"{PREFIX}{re.sub('[^a-z0-9]', '', worker.lower())[:16]}-{os.getpid()}"
        self._directory = directory
        self._shared: dict[TestbedSpec, _Shared] = {}
        self._made = 0
        clear_abandoned(self._state)

    def take(self, flags: dict[str, Any]) -> Testbed:
        """A testbed as emu.testbed(**flags) makes it, with zeros in the devices that it made.

        Raises:
            UserError, HostError, TestbedError, WorkerError: as emu.testbed().
        """
        key = self._key(flags)
        shared = self._shared.get(key)
        if shared is not None and not self._is_whole(shared.testbed):
            self._take_down(key)
            shared = None
        if shared is None:
            shared = self._shared[key] = self._make(flags)
        elif shared.used:
            _wipe(shared.testbed.record)
        shared.used = True
        shared.changed_ns = self._changed_ns(shared.testbed)
        return shared.testbed

    def give_back(self, testbed: Testbed) -> None:
        """End what the test left running on the hosts."""
        for shared in self._shared.values():
            if shared.testbed is testbed and self._changed_ns(testbed) != shared.changed_ns:
                _end_programs(testbed)

    def close(self) -> None:
        """Take all down.

        Raises:
            TestbedError: one is not wholly down; the others are.
        """
        with ExitStack() as all_of_them:
            for shared in self._shared.values():
                all_of_them.push(shared.life)
            self._shared.clear()

    def _key(self, flags: dict[str, Any]) -> TestbedSpec:
        for flag in flags:
            if flag not in _KEYWORDS:
                raise UserError(
                    f"pytest.mark.emu has no {flag!r}", remedy=did_you_mean(flag, _KEYWORDS)
                )
        file = flags.get("spec_file")
        return replace(
            make_spec(flags_of(flags), None if file is None else Path(file)), name=PREFIX
        )

    def _make(self, flags: dict[str, Any]) -> _Shared:
        """Testbeds that are idle give way where there is no room."""
        try:
            return self._make_one(flags)
        except HostError as error:
            if error.capability not in {"memory", "shm"} or not self._shared:
                raise
        self.close()
        return self._make_one(flags)

    def _make_one(self, flags: dict[str, Any]) -> _Shared:
        life = ExitStack()
        while True:
            self._made += 1
            name = f"{self._names}-{self._made}"
            if not self._state.record_path(name).exists():  # of an earlier process of this pid
                break
        made = make_testbed(name=name, directory=self._directory, state=self._state, **flags)
        return _Shared(life.enter_context(made), life)

    def _take_down(self, key: TestbedSpec) -> None:
        self._shared.pop(key).life.close()

    def _changed_ns(self, testbed: Testbed) -> int:
        with suppress(FileNotFoundError):
            return self._state.record_path(testbed.name).stat().st_mtime_ns
        return 0

    def _is_whole(self, testbed: Testbed) -> bool:
        """Whether a testbed that a test had is as it was made: up, with its processes, files and devices."""
        record = testbed.record
        try:
            found = self._state.load(record.name)
            if (found.id, found.phase) != (record.id, "up"):
                return False
            for host in record.hosts if record.guests else ():
                rows = devices_of(testbed, host)
                if [row["path"] for row in rows] != [path for path, _ in testbed.regions]:
                    return False
                if any(row["mode"] != "devdax" for row in rows):
                    return False
        except EmuError:
            return False
        own = [entry.process for entry in record.processes if not entry.host]
        files = [Path(entry.step.path) for entry in record.steps if hasattr(entry.step, "path")]
        return all(map(process.is_running, own)) and all(map(os.path.lexists, files))


def _end_programs(testbed: Testbed) -> None:
    own = {entry.process for entry in testbed.record.processes if not entry.host}
    left = [found for found in running(testbed.record) if found not in own]
    process.terminate(left)
    for found in left:
        testbed.forget(found.pid)


def _wipe(record: Record) -> None:
    """Zeros in the devices that the testbed made, and no pool on any device or memory node."""
    for step in (entry.step for entry in record.steps):
        match step:
            case AllocateDevice():
                _write_zeros(Path(step.path), step.size_bytes)
                _remove_directories(step.path)
            case AttachDevice() if not step.has_directory:
                _remove_directories(step.path)
            case StartProcess():
                for path in step.creates:
                    _remove_directories(path)
            case _:
                pass


def _write_zeros(path: Path, size_bytes: int) -> None:
    with path.open("r+b", buffering=0) as device:
        left = size_bytes
        while left:
            left -= device.write(_ZEROS[:left]) or 0


def _remove_directories(path: str) -> None:
    for suffix in DIRECTORY_SUFFIXES:
        Path(path + suffix).unlink(missing_ok=True)


def clear_abandoned(state: StateDirectory) -> None:
    """Take down what pytest processes left that were killed."""
    for name in state.names():
        if not name.startswith(PREFIX):
            continue
        try:
            owner = state.load(name).owner
            if owner is not None and not owner.alive():
                Runner(state).down(name)
        except TestbedError as error:
            if state.record_path(name).exists():  # else another session was quicker
                warnings.warn(
                    f"left by a killed session: {error}", pytest.PytestWarning, stacklevel=2
                )
