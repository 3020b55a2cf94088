"""A server that lives as long as a block of this program: started, ready when it says so, ended."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from emu.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

READY = "ready"
"""The line that a server prints when it serves."""
_GRACE_S = 5.0
_LOG_TAIL = 2000


def _popen(argv: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, **popen)


@contextmanager
def running_server(
    argv: Sequence[str],
    log: Path,
    *,
    role: str,
    remedy: str = "",
    spawn: Callable[..., subprocess.Popen[bytes]] = _popen,
) -> Iterator[subprocess.Popen[bytes]]:
    """The server, ready, within a with block; SIGTERM ends it after that, SIGKILL if it does not listen.

    Args:
        argv: the command, for instance of registry.server_argv(...).
        log: takes its stderr, appended.
        role: what it is, for messages, for instance "memory-node".
        remedy: what to do when it does not start.
        spawn: starts the process, with the arguments of subprocess.Popen.

    Raises:
        WorkerError: it cannot be started, or ended before it was ready; carries its status and last lines.
    """
    with log.open("ab") as stderr:
        try:
            process = spawn(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for us: we end the server when we are done
            )
        except OSError as error:
            raise WorkerError(
                f"the {role} cannot be started: {error}", role=role, remedy=remedy
            ) from error
    try:
        assert process.stdout is not None
        if process.stdout.readline().decode(errors="replace").rstrip("\n") != READY:
            raise _did_not_start(end(process), log, role, remedy)
        yield process
    finally:
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def end(process: subprocess.Popen[bytes]) -> int:
    """Terminate a process, wait, then kill; returns its exit status, negative for a signal."""
    process.terminate()
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def last_line(text: str) -> str:
    """The last line that a process wrote, for a message."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def _did_not_start(status: int, log: Path, role: str, remedy: str) -> WorkerError:
    text = log.read_text(errors="replace")
    return WorkerError(
        f"the {role} ended with status {status}: {last_line(text)}",
        role=role,
        exit_status=status,
        log_tail=text[-_LOG_TAIL:],
        remedy=remedy,
    )
