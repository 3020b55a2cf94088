"""Messages between the coordinator and its workers: JSON, one per line, over a socket pair."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import socket

Message: TypeAlias = dict[str, Any]


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of a conversation.

    Args:
        sock: a connected stream socket; the channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unread = bytearray()
        self._messages: deque[Message] = deque()

    def fileno(self) -> int:
        """For select()."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed from error

    def drain(self) -> list[Message]:
        """Every message that is there, waiting for bytes only if none is.

        Raises:
            ChannelClosed: the other end is gone, and nothing it sent is left.
        """
        if not self._messages:
            self._read()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ChannelClosed: the other end is gone, or died in the middle of a message.
        """
        while not self._messages:
            self._read()
        return self._messages.popleft()

    def _read(self) -> None:
        try:
            received = self._sock.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed from error
        if not received:
            raise ChannelClosed
        self._unread += received
        *lines, rest = self._unread.split(b"\n")
        self._messages.extend(json.loads(line) for line in lines)
        self._unread = bytearray(rest)

    def close(self) -> None:
        """Close this end; closing twice is allowed."""
        self._sock.close()
