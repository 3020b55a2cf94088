"""Starts the testbed's own processes: on their own, logged, and ready when they say so."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import WorkerError
from emu.provision.process import ProcessId, identify
from emu.server import last_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from emu.provision.steps import StartProcess

READY_TIMEOUT_S = 60.0


def start(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> ProcessId:
    """Start a process in its own session, reading nothing, its output appended to an existing log.

    Args:
        argv: the command; argv[0] is a path.
        log: takes stdout and stderr.
        env: added to this process's environment.

    Raises:
        OSError: it cannot be started.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        {**os.environ, "PYTHONUNBUFFERED": "1", **env},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores them; the program shall not
    )
    return identify(pid) or ProcessId(pid, 0)  # (pid, 0): it has ended already; wait_ready says so


def wait_ready(
    process: ProcessId, step: StartProcess, *, timeout_s: float = READY_TIMEOUT_S
) -> None:
    """Wait until the process has written the line that says that it serves.

    Raises:
        WorkerError: it ended first, or says nothing for timeout_s; carries its last lines.
    """
    log = Path(step.log)
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = _ended(process.pid)
        if step.ready in log.read_text(errors="replace").splitlines():
            return
        if ended or time.monotonic() > deadline:
            text = log.read_text(errors="replace")
            raise WorkerError(
                f"{step.role} {'ended' if ended else 'was not ready in time'}: {last_line(text)}",
                role=step.role,
                exit_status=status,
                log_tail=text[-2000:],
                remedy="go without it: --rdma off",
            )
        time.sleep(0.01)


def _ended(pid: int) -> tuple[bool, int | None]:
    """Whether a child of ours has ended, and its exit status (negative for a signal)."""
    with suppress(ChildProcessError):
        found, status = os.waitpid(pid, os.WNOHANG)
        return (False, None) if found == 0 else (True, os.waitstatus_to_exitcode(status))
    return True, None
