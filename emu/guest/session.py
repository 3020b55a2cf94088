"""The host's side of a guest's agent: one session on one of its ports.

The wire is described in qemu/guest/agent.py. A port serves one client at a time: a lock on a file beside its socket
says who, and goes with the process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from emu.errors import EmuError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO_RETRY_S = 3.0
SILENCE_S = 60.0
"""An agent that runs a program says every few seconds that it is there; on a busy machine later."""
PORT_WAIT_S = 60.0


def agent_socket(directory: str, port: int) -> str:
    """Socket of one of the agent's ports."""
    return f"{directory}/agent{port}"


class GuestSilent(EmuError):
    """A guest's agent does not answer, or its QEMU is gone."""


class Session:
    """A session with an agent; one request, its frames, its answer.

    Args:
        sock: connected to one of the agent's ports, the hello done.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unread = bytearray()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Send one frame.

        Raises:
            GuestSilent: QEMU is gone.
        """
        try:
            self.sock.sendall(kind + len(body).to_bytes(4, "big") + body)
        except OSError as error:
            raise GuestSilent("the guest ended") from error

    def request(self, **values: Any) -> None:
        """Send the request."""
        self.send(b"R", json.dumps(values).encode())

    def frames(self) -> list[tuple[bytes, bytes]]:
        """What has come, waiting for bytes: (kind, body) of each whole frame, possibly none.

        Raises:
            GuestSilent: QEMU is gone, or the agent does not answer in the socket's timeout.
        """
        try:
            data = self.sock.recv(1 << 20)
        except TimeoutError as error:
            raise GuestSilent("the guest's agent does not answer in time") from error
        except OSError as error:
            raise GuestSilent("the guest ended") from error
        if not data:
            raise GuestSilent("the guest ended")
        self._unread += data
        found = []
        while len(self._unread) >= 5:
            end = 5 + int.from_bytes(self._unread[1:5], "big")
            if len(self._unread) < end:
                break
            kind = bytes(self._unread[:1])
            if kind == b"X":
                raise GuestSilent("the guest's agent was restarted", remedy="run it again")
            found.append((kind, bytes(self._unread[5:end])))
            del self._unread[:end]
        return found

    def answer(self) -> dict[str, Any]:
        """Wait for the final answer of a request without output.

        Raises:
            UserError: the agent refuses; says why.
            GuestSilent: no answer.
        """
        while True:
            for kind, body in self.frames():
                if kind == b"A":
                    return checked(json.loads(body))


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if the agent did what was asked.

    Raises:
        UserError: it did not.
    """
    if not answer["ok"]:
        raise UserError(answer["message"], remedy=answer.get("remedy", ""))
    return answer


@contextmanager
def open_session(
    directory: str, ports: int, *, timeout_s: float | None = 30.0
) -> Iterator[Session]:
    """A session on a free port.

    Args:
        directory: the guest's.
        ports: how many it has.
        timeout_s: how long the agent may stay silent, at the hello and after; None waits for ever after it.

    Raises:
        GuestSilent: QEMU is gone or the agent does not answer.
        UserError: all ports are in use.
    """
    port, lock = _take_port(directory, ports)
    try:
        deadline = time.monotonic() + (timeout_s or HELLO_RETRY_S * 10)
        sock = _hello(agent_socket(directory, port), deadline)
        with sock:
            sock.settimeout(timeout_s)
            yield Session(sock)
    finally:
        os.close(lock)


def _take_port(directory: str, ports: int) -> tuple[int, int]:
    """A port that nobody uses, and the open file that keeps it so."""
    deadline = time.monotonic() + PORT_WAIT_S
    while True:
        for port in range(ports):
            try:
                path = f"{agent_socket(directory, port)}.lock"
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise GuestSilent("the guest is gone", remedy="emu status") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return port, fd
        if time.monotonic() > deadline:
            raise UserError(
                f"{ports} programs run in the guest, it serves no more at a time",
                remedy="end one, or raise agent_ports",
            )
        time.sleep(0.05)


def _hello(path: str, deadline: float) -> socket.socket:
    """Connect and greet, again and again: what an earlier client left half-written may swallow a hello."""
    while True:
        hello = f"EMU1 {secrets.token_hex(8)}\n".encode()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            sock.sendall(hello)
            if _skip_to(sock, hello, min(deadline, time.monotonic() + HELLO_RETRY_S)):
                return sock
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            raise GuestSilent("the guest is gone", remedy="emu status") from error
        except OSError:  # it went away in the middle
            pass
        sock.close()
        if time.monotonic() > deadline:
            raise GuestSilent("the guest's agent does not answer")
        time.sleep(0.1)


def _skip_to(sock: socket.socket, hello: bytes, deadline: float) -> bool:
    """Read up to the agent's hello; False when it does not come."""
    seen = b""
    while not seen.endswith(hello):
        rest = deadline - time.monotonic()
        if rest <= 0 or not select.select([sock], [], [], rest)[0]:
            return False
        # byte by byte to its very end: what follows belongs to the session
        data = sock.recv(1)
        if not data:
            return False
        seen = (seen + data)[-len(hello) :]
    return True


def ask(directory: str, ports: int, *, timeout_s: float = 30.0, **request: Any) -> dict[str, Any]:
    """One request and its answer.

    Raises:
        UserError, GuestSilent: refused; no answer.
    """
    with open_session(directory, ports, timeout_s=timeout_s) as session:
        session.request(**request)
        return session.answer()
