"""Which processes are a testbed's, and ending them without hitting another's."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emu.process import ProcessId, boot_id, identify, is_running, pid_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "TAG",
    "ProcessId",
    "ancestors",
    "boot_id",
    "identify",
    "is_running",
    "mapping",
    "tagged",
    "terminate",
]

TAG = "EMU_TESTBED_ID"
"""Environment variable that every process started in a testbed inherits; its value is the record's id."""


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208


def tagged(testbed_id: str) -> list[ProcessId]:
    """Running processes whose initial environment carries this testbed's id: what it started, and their children."""
    tag = f"{TAG}={testbed_id}".encode()
    found = []
    for pid in _pids():
        process = identify(pid)
        with suppress(OSError):
            if process and tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def mapping(path: Path) -> list[int]:
    """Pids that have this file, or one below this directory, mapped, as far as this user may look."""
    needles = [f" {path}{end}".encode() for end in ("/", "\n")]
    found = []
    for pid in _pids():
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            if any(needle in maps for needle in needles):
                found.append(pid)
    return found


def ancestors() -> set[int]:
    """This process and those that it descends from."""
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            break
        pid = int(stat[stat.rindex(b")") + 2 :].split()[1])
    return pids


def terminate(processes: Iterable[ProcessId], *, grace_s: float = 5.0) -> list[ProcessId]:
    """End processes: SIGTERM, wait, SIGKILL, wait. Returns those that did not end.

    A pidfd is opened before the identity is checked, so a pid reused in between is never signalled. What lives in
    another pid namespace cannot be signalled from here.
    """
    out_of_reach = []
    open_fds: dict[int, ProcessId] = {}
    try:
        for process in processes:
            if process.namespace != pid_namespace():
                out_of_reach += [process] if process.alive() else []
                continue
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                open_fds[fd] = process
        waiting = {fd for fd, process in open_fds.items() if process.alive()}
        for signals, wait_s in (
            ((signal.SIGTERM, signal.SIGCONT), grace_s),
            ((signal.SIGKILL,), 5.0),
        ):
            for fd in waiting:
                for number in signals:
                    with suppress(
                        OSError
                    ):  # it ended, or it is no longer this user's: then it survives
                        signal.pidfd_send_signal(fd, number)
            waiting = _wait(waiting, wait_s)
        return [*out_of_reach, *(open_fds[fd] for fd in waiting)]
    finally:
        for fd, process in open_fds.items():
            os.close(fd)
            _reap(process.pid)


def _wait(waiting: set[int], wait_s: float) -> set[int]:
    """The pidfds whose process has not ended when the time is over."""
    deadline = time.monotonic() + wait_s
    poller = select.poll()
    for fd in waiting:
        poller.register(fd, select.POLLIN)
    left = set(waiting)
    while left and (rest := deadline - time.monotonic()) > 0:
        for fd, _ in poller.poll(rest * 1000):
            poller.unregister(fd)
            left.discard(fd)
    return left


def _reap(pid: int) -> None:
    """Collect an ended child; a process that is not a child of ours is init's."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
