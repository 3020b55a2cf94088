"""The coordinator's side of the workers: start them, talk to them, notice their death, end them."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu import errors
from emu.errors import EmuError, WorkerError
from emu.sac.channel import Channel, ChannelClosed, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from emu.provision.testbed import Testbed

_LOG_TAIL_BYTES = 2000


class WorkerProcess:
    """One worker.

    Args:
        roles: of "prefill", "decode" and "oracle", one or several.
        host: the testbed's host that it runs on.
        spec: the run's specification, as plain data.
        testbed: where it runs and is recorded; its output goes to the host's log.
    """

    def __init__(
        self, roles: Sequence[str], host: str, spec: dict[str, Any], testbed: Testbed
    ) -> None:
        self.role = " and ".join(roles)
        self._testbed = testbed
        self._log_path = Path(testbed.log_path(host))
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-P", "-m", "emu.sac.worker", *roles]
        if testbed.guest(host) is None:  # a guest's agent ends what its client leaves behind
            argv += ["--parent", str(os.getpid())]
        with theirs, self._log_path.open("ab") as log:
            self._process = testbed.spawn(
                host,
                argv,
                stdin=theirs,
                stdout=log,
                stderr=log,
            )
        self.channel = Channel(ours)
        self.send({"spec": spec})

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WorkerError: the worker is dead.
        """
        try:
            self.channel.send(message)
        except ChannelClosed:
            raise self._death() from None

    def drain(self) -> list[Message]:
        """The messages that have come, waiting for bytes only if none has.

        Raises:
            WorkerError: the worker died.
            EmuError: what the worker raised.
        """
        try:
            messages = self.channel.drain()
        except ChannelClosed:
            raise self._death() from None
        for message in messages:
            if "error" in message:
                raise _remote_error(self.role, **message["error"])
        return messages

    def _death(self) -> WorkerError:
        try:
            status: int | None = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = None
        tail = self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        last_line = tail.splitlines()[-1] if tail else "it wrote nothing"
        how = (
            f"was killed by signal {-status}"
            if status is not None and status < 0
            else f"ended with status {status}"
        )
        return WorkerError(
            f"the {self.role} process {how}: {last_line}",
            role=self.role,
            exit_status=status,
            log_tail=tail,
            remedy="run it again; if it happens twice, see `emu doctor` for memory, and report it with the log",
        )

    def hang_up(self) -> None:
        """Tell it that nothing more comes; one that listens ends by itself."""
        self.channel.close()

    def end(self, wait_s: float) -> None:
        """Wait for its end after hang_up(); one that is still busy then is killed."""
        try:
            self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._testbed.forget(self.pid)


def _remote_error(role: str, kind: str, message: str, remedy: str) -> EmuError:
    """The worker's error: the plain kinds as themselves, those with facts of their own as a WorkerError."""
    if kind in {"UserError", "HostError"}:
        error: EmuError = getattr(errors, kind)(message, remedy=remedy)
        return error
    return WorkerError(f"{role}: {message}", role=role, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Call:
    """A message to a worker, and whom to tell about its progress."""

    worker: WorkerProcess
    message: Message


def call_all(
    calls: Sequence[Call], workers: Sequence[WorkerProcess], tick: Callable[[], None]
) -> list[Any]:
    """Let several workers do their parts side by side; their results, in the order of calls.

    Args:
        calls: one per worker at most.
        workers: every worker of the run: the death of an idle one ends the run as well, and at once.
        tick: called for each unit of progress.

    Raises:
        WorkerError, EmuError: of the first that failed.
    """
    results: dict[WorkerProcess, Any] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.channel, selectors.EVENT_READ, worker)
        for call in calls:
            call.worker.send(call.message)
        while len(results) < len(calls):
            for key, _ in selector.select():
                for message in key.data.drain():
                    if "progress" in message:
                        tick()
                    else:
                        results[key.data] = message["result"]
    return [results[call.worker] for call in calls]
