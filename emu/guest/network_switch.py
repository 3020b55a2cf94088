"""The private network of a testbed's guests: passes Ethernet frames between QEMU processes on one unix socket.

No port is open to anybody else, no root is needed, and a guest may go and come back. A frame is preceded by its
length in four bytes, big-endian (QEMU's stream netdev).
"""

from __future__ import annotations

import argparse
import selectors
import socket
from pathlib import Path

UNSENT_LIMIT_BYTES = 4 << 20
"""A guest that does not take its frames loses the later ones, as on any Ethernet."""


class Port:
    """One guest's connection.

    Args:
        sock: connected.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = bytearray()
        self._unread = bytearray()

    def frames(self) -> list[bytes] | None:
        """Whole frames that have come, their lengths before them; None when the guest is gone."""
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unread += data
        found, start = [], 0
        while len(self._unread) - start >= 4:
            end = start + 4 + int.from_bytes(self._unread[start : start + 4], "big")
            if len(self._unread) < end:
                break
            found.append(bytes(self._unread[start:end]))
            start = end
        del self._unread[:start]
        return found

    def push(self, frame: bytes) -> None:
        """Queue a frame, or drop it."""
        if len(self.unsent) < UNSENT_LIMIT_BYTES:
            self.unsent += frame

    def flush(self) -> None:
        """Send what the guest takes now."""
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except OSError:  # full, or gone: then the next read says so
            return


class Switch:
    """A learning switch.

    Args:
        listener: a listening unix socket.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._ports: set[Port] = set()
        self._where: dict[bytes, Port] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait for something and pass it on."""
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
                continue
            port: Port = key.data
            if events & selectors.EVENT_READ:
                frames = port.frames()
                if frames is None:
                    self._drop(port)
                    continue
                for frame in frames:
                    self._pass_on(port, frame)
            port.flush()
        for port in self._ports:
            if port.unsent:
                port.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if port.unsent else 0)
            if self._selector.get_key(port.sock).events != wanted:
                self._selector.modify(port.sock, wanted, port)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        port = Port(sock)
        self._ports.add(port)
        self._selector.register(sock, selectors.EVENT_READ, port)

    def _drop(self, port: Port) -> None:
        self._selector.unregister(port.sock)
        port.sock.close()
        self._ports.discard(port)
        self._where = {address: at for address, at in self._where.items() if at is not port}

    def _pass_on(self, source: Port, frame: bytes) -> None:
        """To the port that has the address, or to all others when none is known to (or it is a group's)."""
        to, sender = frame[4:10], frame[10:16]
        self._where[sender] = source
        known = None if to[:1] and to[0] & 1 else self._where.get(to)
        for port in self._ports if known is None else {known}:
            if port is not source:
                port.push(frame)


def main() -> None:
    """Entry point of `python -m emu.guest.network_switch --socket PATH`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    path = parser.parse_args().socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        print("ready", flush=True)  # noqa: T201
        switch = Switch(listener)
        while True:
            switch.turn()


if __name__ == "__main__":
    main()
