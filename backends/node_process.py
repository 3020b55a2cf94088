"""Starting and ending a memory node from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.node_socket import clear
from emu.errors import HostError, UserError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class NodeProcess:
    """A running memory node that ends with this process.

    Attributes:
        pid: its process.
        socket_path: where it listens; the store's URL is "rdma://" + str(socket_path).
        size_bytes: the memory that it owns.
    """

    def __init__(
        self, process: subprocess.Popen[str], lifeline: int, path: Path, size: int
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self.pid = process.pid
        self.socket_path = path
        self.size_bytes = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def close(self, timeout_s: float = 5.0) -> None:
        """Terminate it, wait, then kill. Closing twice is allowed."""
        if self._lifeline < 0:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._lifeline)
        self._lifeline = -1
        _close_pipes(self._process)
        clear(self.socket_path)  # a killed node leaves its socket


def start_node(path: Path | str, size_bytes: int, *, numa_node: int | None = None) -> NodeProcess:
    """Start a memory node and wait until it listens.

    Args:
        path: of its Unix socket.
        size_bytes: memory that it owns, a multiple of 4096.
        numa_node: bind the memory there.

    Raises:
        UserError: it refused the path or the size, also one that does not fit the free memory; with its words.
        HostError: it could not be started, or ended before it listened.
    """
    path = Path(path).absolute()
    # A pipe, not PR_SET_PDEATHSIG: that signal comes when the starting thread ends, not the process.
    inherited, lifeline = os.pipe()
    command = [sys.executable, "-P", "-m", "backends.memory_node", "--socket", str(path)]
    command += ["--size", str(size_bytes), "--parent-fd", str(inherited)]
    if numa_node is not None:
        command += ["--numa-node", str(numa_node)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(inherited,),
            start_new_session=True,  # Ctrl-C is for us; we end the node when we are done
        )
    except OSError as error:
        os.close(lifeline)
        raise HostError(f"cannot start a memory node: {error}") from error
    finally:
        os.close(inherited)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise _start_failure(process, lifeline)
    return NodeProcess(process, lifeline, path, size_bytes)


def _start_failure(process: subprocess.Popen[str], lifeline: int) -> UserError | HostError:
    _, said = process.communicate()
    os.close(lifeline)
    message = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
    if process.returncode in {1, 2}:
        return UserError(message)
    return HostError(f"the memory node ended with status {process.returncode}: {message}")


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
