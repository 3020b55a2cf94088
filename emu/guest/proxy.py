"""Stands on the host for a program in a guest: same streams, signals and end, so that a Popen is all one needs.

Its environment and working directory become the program's; where its stdin is a socket, so is the program's, and
what the program writes there comes back on it. If this process dies, the agent kills the program.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
import tty
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from emu.errors import EmuError
from emu.guest.session import SILENCE_S, GuestSilent, Session, checked, open_session

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

TAG = "EMU_TESTBED_ID"
"""Says whose process this is (emu.provision.process); it is no business of the guest's."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
CHUNK = 1 << 16


def main() -> None:
    """Entry point of `python -m emu.guest.proxy DIRECTORY PORTS tty|plain PROGRAM ARGUMENT...`."""
    directory, ports, kind, *argv = sys.argv[1:]
    try:
        with open_session(directory, int(ports), timeout_s=None) as session:
            answer = _Proxy(session, with_terminal=kind == "tty").run(argv)
    except EmuError as error:
        os.write(2, f"emu: {error}\n".encode())
        sys.exit(127)
    _end_as(answer["status"])


class _Proxy:
    def __init__(self, session: Session, *, with_terminal: bool) -> None:
        self._session = session
        self._terminal = with_terminal
        self._sock: socket.socket | None = None
        if stat.S_ISSOCK(os.fstat(0).st_mode):
            self._sock = socket.socket(fileno=os.dup(0))
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        self._signals: list[int] = []
        signal.set_wakeup_fd(wake)

    def run(self, argv: list[str]) -> dict[str, Any]:
        """Run the program to its end; the agent's answer."""
        for number in FORWARDED:
            signal.signal(number, self._note)
        request: dict[str, Any] = {
            "do": "exec",
            "argv": argv,
            "env": {k: v for k, v in os.environ.items() if k != TAG},
            "cwd": os.getcwd(),  # noqa: PTH109
            "socket": self._sock is not None,
        }
        if not self._terminal:
            self._session.request(**request)
            return self._exchange()
        signal.signal(signal.SIGWINCH, self._note)
        saved = termios.tcgetattr(0)
        tty.setraw(0)
        try:
            self._session.request(**request, tty=_window())
            return self._exchange()
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals.append(number)

    def _exchange(self) -> dict[str, Any]:
        poller = select.poll()
        agent = self._session.sock.fileno()
        poller.register(agent, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        poller.register(0, select.POLLIN)
        heard_at = time.monotonic()
        while True:
            if time.monotonic() - heard_at > SILENCE_S:
                raise GuestSilent("the guest's agent does not answer", remedy="see `emu status`")
            for fd, _ in poller.poll(SILENCE_S * 1000):
                if fd == self._wake:
                    self._pass_signals()
                elif fd == 0:
                    data = _read(0)
                    self._session.send(b"i" if data else b"c", data)
                    if not data:
                        poller.unregister(0)
                else:
                    heard_at = time.monotonic()
                    for kind, body in self._session.frames():
                        if kind == b"A":
                            return checked(json.loads(body))
                        if kind != b"k":
                            self._emit(kind, body)

    def _pass_signals(self) -> None:
        os.read(self._wake, CHUNK)
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGWINCH:
                self._session.send(b"w", json.dumps(_window()).encode())
            else:
                self._session.send(b"s", json.dumps({"number": number}).encode())

    def _emit(self, kind: bytes, body: bytes) -> None:
        write: Callable[[bytes | memoryview], int] = (
            self._sock.send if self._sock and kind == b"b" else _writer(2 if kind == b"e" else 1)
        )
        view = memoryview(body)
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody takes it any more
            while view:
                view = view[write(view) :]


def _writer(fd: int) -> Callable[[bytes | memoryview], int]:
    return lambda data: os.write(fd, data)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK)
    except OSError:  # a terminal that hung up
        return b""


def _window() -> dict[str, int]:
    rows, columns, *_ = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))
    return {"rows": rows, "columns": columns}


def _end_as(status: int) -> NoReturn:
    """End as the program did, by a signal, too."""
    if status < 0:
        signal.set_wakeup_fd(-1)
        with suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        status = 128 - status  # a signal that does not end us
    os._exit(status)


if __name__ == "__main__":
    main()
