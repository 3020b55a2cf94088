"""Which process is which, and whether it still runs: pid, start time, boot, pid namespace."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from emu.errors import HostError

_PR_SET_PDEATHSIG = 1


@cache
def boot_id() -> str:
    """The kernel's random name of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """The pid namespace that this process's pids belong to."""
    return str(Path("/proc/self/ns/pid").readlink())


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, told apart from a later one with the same pid.

    Attributes:
        pid: in its own pid namespace.
        start_time: clock ticks since boot, /proc/PID/stat field 22 (proc_pid_stat(5)), without the offset that the
            reader's time namespace adds (time_namespaces(7)).
        boot: the host's boot id; by default this boot's.
        namespace: the pid namespace, by default ours; a pid of another one cannot be looked up from here.
    """

    pid: int
    start_time: int
    boot: str = field(default_factory=boot_id)
    namespace: str = field(default_factory=pid_namespace)

    @classmethod
    def current(cls) -> ProcessId:
        """The calling process.

        Raises:
            HostError: /proc does not show it.
        """
        try:
            own = identify(os.getpid())
        except OSError as error:
            raise HostError(
                f"this process cannot look itself up in /proc: {error.strerror}",
                remedy="see that /proc is mounted, and that files can be opened (ulimit -n)",
            ) from error
        assert own is not None
        return own

    def alive(self) -> bool:
        """Whether it still runs: False only where the kernel says that it does not.

        What cannot be told counts as running, so that nobody living loses what it holds: a process of another pid
        namespace of this boot, one that /proc hides, and any failure to look (no file descriptor, no memory).
        """
        try:
            if self.boot != boot_id():
                return False
            if self.namespace != pid_namespace():
                return True
            found = identify(self.pid)
        except OSError:
            return True
        # Offsets of time namespaces that are no whole ticks are rounded: one tick is no other process.
        return found is not None and abs(found.start_time - self.start_time) <= 1


def state(pid: int) -> str:
    """State of the process of that pid in our namespace, as ps gives it: "R", "S", "T" ...

    "" when it has ended, "?" when it cannot be told.
    """
    try:
        fields = _stat(pid)
        return fields[0].decode() if fields and identify(pid) is not None else ""
    except OSError:
        return "?"


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; none when there is no such process.

    Raises:
        OSError: it cannot be told.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        if _exists(pid):  # hidden (mount option hidepid of proc(5)), or /proc is not mounted
            raise
        return []
    return stat[stat.rindex(b")") + 2 :].split()  # the name may hold blanks and brackets


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def identify(pid: int) -> ProcessId | None:
    """The running process of that pid in our namespace, None when there is none (a zombie has ended).

    Raises:
        OSError: it cannot be told: no permission, no free file descriptor, no memory.
    """
    fields = _stat(pid)
    if not fields:
        return None
    threads, start_time = int(fields[17]), int(fields[19])
    # A zombie's memory is gone, unless it is a main thread whose other threads still run.
    if fields[0] in {b"Z", b"X"} and threads <= 1:
        return None
    return ProcessId(pid, start_time - _boottime_offset_ticks())


def _boottime_offset_ticks() -> int:
    """What our time namespace adds to the start times that /proc shows."""
    try:
        offsets = Path("/proc/self/timens_offsets").read_text()
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    for line in offsets.splitlines():
        clock, seconds, nanoseconds = line.split()
        if clock == "boottime":
            offset_ns = int(seconds) * 1_000_000_000 + int(nanoseconds)
            return offset_ns * os.sysconf("SC_CLK_TCK") // 1_000_000_000
    return 0


def is_running(process: ProcessId) -> bool:
    """ProcessId.alive as a function."""
    return process.alive()


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (strictly: the thread that started us).

    Args:
        parent_pid: the process that started us; 0: whoever the parent is now.
        number: the signal.

    Raises:
        SystemExit: the parent has ended already.
    """
    before = parent_pid or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != before:
        raise SystemExit("the parent process is gone")
