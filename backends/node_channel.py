"""The control plane's messages: packets with file descriptors on a Unix socket, lines on a TCP connection."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKET_BYTES = 65536
_MAX_FDS = 3
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class ChannelEnded(Exception):
    """The other side is gone."""


class Channel:
    """JSON messages over a connected socket, which becomes this object's.

    Args:
        sock: SOCK_SEQPACKET of a Unix socket, or TCP. A host that vanishes is noticed after half a minute.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.carries_fds = sock.family == socket.AF_UNIX
        self._unread = bytearray()
        if not self.carries_fds:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            OSError: the other side is gone, or does not read.
            ValueError: file descriptors, which TCP does not carry.
        """
        raw = json.dumps(message).encode()
        if self.carries_fds:
            socket.send_fds(self.sock, [raw], list(fds))
        elif fds:
            raise ValueError("file descriptors pass only on one machine")
        else:
            self.sock.sendall(raw + b"\n")

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """Whole messages that have come, with their file descriptors, which the caller closes; waits if the socket does.

        Raises:
            ChannelEnded: the other side is gone.
            OSError: so it is, or nothing came in the socket's timeout.
        """
        if self.carries_fds:
            flags = socket.MSG_CMSG_CLOEXEC
            raw, fds, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, _MAX_FDS, flags)
            if not raw:
                for fd in fds:
                    os.close(fd)
                raise ChannelEnded
            return [(raw, fds)]
        raw = self.sock.recv(PACKET_BYTES)
        if not raw or len(self._unread) > PACKET_BYTES:
            raise ChannelEnded
        self._unread += raw
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        return [(bytes(line), []) for line in lines]

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
