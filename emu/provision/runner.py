"""Carries a plan out, step by recorded step, and takes testbeds down."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import TestbedError
from emu.provision import boot, launch, native_rdma, process
from emu.provision.attached import identities, identity_of
from emu.provision.device_files import allocate, clear
from emu.provision.state import FileId, ProcessRecord, Record, StateDirectory, StepRecord
from emu.provision.steps import (
    AddRdmaLink,
    AllocateDevice,
    AttachDevice,
    ClearDevice,
    MakeDirectory,
    MakeFile,
    MakeRoot,
    MakeScratch,
    SetUpGuest,
    StartGuest,
    StartProcess,
)
from emu.provision.undo import MARKER, Undone, draft_path, running, undo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from emu.provision.plan import Plan
    from emu.provision.process import ProcessId

Progress = Callable[[str], None]
ATTACH_LOCK = ".attach"  # no testbed's name begins with a dot


def _quiet(line: str) -> None:
    del line


class Runner:
    """Makes and unmakes testbeds.

    Args:
        state: where the records are.
        progress: called with one line before every step.
    """

    def __init__(self, state: StateDirectory, progress: Progress = _quiet) -> None:
        self.state = state
        self.progress = progress

    def up(self, plan: Plan, *, owner: ProcessId | None = None) -> Record:
        """Carry the plan out; on any failure what was done is undone again.

        Args:
            plan: what to do.
            owner: the process whose end ends the testbed, None for a lasting one.

        Raises:
            TestbedError: the name was taken meanwhile, or a step failed.
            HostError: a medium was full after all.
        """
        with self.state.lock(plan.name, wait_s=0.5):
            if self.state.record_path(plan.name).exists():
                raise TestbedError(
                    f"testbed {plan.name!r} exists already",
                    name=plan.name,
                    remedy=f"run `emu down {plan.name}` first, or choose another --name",
                )
            record = _new_record(plan, owner)
            try:
                self.state.save(record)
                for entry in record.steps:
                    self.progress(str(entry.step))
                    self.carry_out(record, entry)
                record.phase = "up"
                self.state.save(record)
            except BaseException:
                if not undo(record, self.progress).failed:
                    self.state.forget(record.name)
                raise
            return record

    def carry_out(self, record: Record, entry: StepRecord) -> None:
        """Do one step and record that it is done."""
        step = entry.step
        try:
            match step:
                case MakeRoot():
                    _make_root(Path(step.path))
                case MakeDirectory():
                    self._make_directory(record, entry, Path(step.path))
                case MakeFile():
                    self._make_file(record, entry, Path(step.path), step.text)
                case AllocateDevice() | AttachDevice() | ClearDevice():
                    self._device(record, entry, step)
                case MakeScratch():
                    draft = draft_path(Path(step.path), record.id)
                    draft.mkdir(mode=0o700)
                    self._publish(record, entry, draft, Path(step.path))
                case StartProcess():
                    self._start(record, entry, step)
                case StartGuest():
                    boot.start(record, step, lambda: self.state.save(record))
                case AddRdmaLink():
                    native_rdma.add(record.name, step, lambda: self._begin(record, entry))
                case SetUpGuest():
                    boot.set_up(record, step, lambda: self.state.save(record))
        except OSError as error:
            raise TestbedError(
                f"cannot {step}: {error.strerror or error}",
                name=record.name,
                remedy="nothing is left behind; mend that and try again",
            ) from error
        entry.done = True
        self.state.save(record)

    def _begin(self, record: Record, entry: StepRecord) -> None:
        """Record that a step which makes no file has begun."""
        entry.made = FileId(0, 0)
        self.state.save(record)

    def _make_directory(self, record: Record, entry: StepRecord, path: Path) -> None:
        draft = draft_path(path, record.id)
        draft.mkdir(mode=0o700)
        (draft / MARKER).write_text(record.id)
        self._publish(record, entry, draft, path)

    def _make_file(self, record: Record, entry: StepRecord, path: Path, text: str) -> None:
        draft = draft_path(path, record.id)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        self._publish(record, entry, draft, path)

    def _device(
        self, record: Record, entry: StepRecord, step: AllocateDevice | AttachDevice | ClearDevice
    ) -> None:
        match step:
            case AllocateDevice():
                draft = draft_path(Path(step.path), record.id)
                allocate(draft, step)
                self._publish(record, entry, draft, Path(step.path))
            case AttachDevice():
                self._attach(record, entry, step.path)
            case ClearDevice():
                clear(Path(step.path), step.size_bytes)

    def _attach(self, record: Record, entry: StepRecord, path: str) -> None:
        """Of two testbeds that want one device at the same time, one gets it."""
        with self.state.lock(ATTACH_LOCK):
            others = {name: d for name, d in self.state.testbeds().items() if name != record.name}
            holder = self._holder(others, path)
            if holder:
                raise TestbedError(
                    f"device {path} was taken by testbed {holder!r}",
                    name=record.name,
                    remedy=f"run `emu down {holder}` first, or name another device",
                )
            entry.done = True
            self.state.save(record)

    def _holder(self, testbeds: Mapping[str, Sequence[str]], path: str) -> str:
        """The testbed that has the device; one that only intends to take it has not."""
        holder = identities(testbeds).get(identity_of(path), "")
        if not holder:
            return ""
        wanted = identity_of(path)
        mine = [
            entry
            for entry in self.state.load(holder).steps
            if isinstance(entry.step, AttachDevice) and identity_of(entry.step.path) == wanted
        ]
        return "" if mine and not any(entry.done for entry in mine) else holder

    def _publish(self, record: Record, entry: StepRecord, draft: Path, path: Path) -> None:
        """Record a draft's identity, then give it its name: a kill at any point leaves nothing unknown."""
        entry.made = _file_id(draft)
        self.state.save(record)
        if os.path.lexists(path):
            raise FileExistsError(None, "something else has that name")
        draft.rename(path)

    def _start(self, record: Record, entry: StepRecord, step: StartProcess) -> None:
        started = launch.start(step.argv, Path(step.log), {process.TAG: record.id})
        record.processes.append(ProcessRecord(started, step.role, host=""))
        self.state.save(record)
        launch.wait_ready(started, step)
        for path in step.creates:
            entry.made = _file_id(Path(path))

    def down(self, name: str) -> Undone:
        """Undo what the record says, end every process of the testbed, forget the record.

        Raises:
            TestbedError: no such testbed, this very command runs in it, or something of it cannot be removed.
        """
        with self.state.lock(name, wait_s=30.0):
            record = self.state.load(name)
            inside = {p.pid for p in running(record)} & process.ancestors()
            if inside:
                raise TestbedError(
                    f"this command runs in testbed {name!r} itself",
                    name=name,
                    remedy="leave it first (exit the `emu exec` shell)",
                )
            record.phase = "going-down"
            self.state.save(record)
            undone = undo(record, self.progress)
            if undone.failed:
                raise TestbedError(
                    f"testbed {name!r} is not wholly down: {'; '.join(undone.failed)}",
                    name=name,
                    remedy=f"mend that and run `emu down {name}` again",
                )
            self.state.forget(name)
            return undone


def _new_record(plan: Plan, owner: ProcessId | None) -> Record:
    return Record(
        id=secrets.token_hex(16),
        name=plan.name,
        boot_id=process.boot_id(),
        phase="coming-up",
        driver=plan.driver,
        reason=plan.reason,
        run_dir=plan.run_dir,
        hosts=plan.hosts,
        coherence=plan.coherence,
        profile=plan.profile,
        devices=plan.devices,
        node_socket=plan.node_socket,
        guests=plan.guests,
        owner=owner,
        steps=[StepRecord(step) for step in plan.steps],
    )


def _file_id(path: Path) -> FileId:
    found = path.lstat()
    return FileId(found.st_dev, found.st_ino)


def _make_root(path: Path) -> None:
    """The directory in a place that every user can write to: it must be this user's alone."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(None, "it belongs to another user, or others can write to it")
