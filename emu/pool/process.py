"""Which process holds something, and whether it still lives: pid, start time, host boot."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one with the same pid.

    Attributes:
        pid: in its own pid namespace.
        start_time: clock ticks since boot, /proc/PID/stat field 22 (proc_pid_stat(5)).
        boot: the host's boot id.
        namespace: the pid namespace; a pid of another one cannot be looked up from here.
    """

    pid: int
    start_time: int
    boot: str
    namespace: str

    @classmethod
    def current(cls) -> Process:
        """The calling process."""
        pid = os.getpid()
        start_time, _ = _start_time_and_running(pid)
        return cls(pid, start_time, _boot_id(), _pid_namespace())

    def alive(self) -> bool:
        """Whether it still runs; one of another pid namespace of this boot counts as running."""
        if self.boot != _boot_id():
            return False
        if self.namespace != _pid_namespace():
            return True
        try:
            start_time, running = _start_time_and_running(self.pid)
        except OSError:
            return False
        return running and start_time == self.start_time


def _start_time_and_running(pid: int) -> tuple[int, bool]:
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()  # the name may hold blanks and brackets
    state, threads, start_time = fields[0], int(fields[17]), int(fields[19])
    # A zombie's memory is gone, unless it is a main thread whose other threads still run.
    return start_time, state not in "ZX" or threads > 1


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
