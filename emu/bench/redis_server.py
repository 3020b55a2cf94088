"""A Redis of our own for a comparison: on a unix socket, nothing written to disk, ended with the benchmark."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emu.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VALUE_BYTES = 8
_REPLY_BYTES = len(f"${VALUE_BYTES}\r\n") + VALUE_BYTES + 2
_START_S = 20.0


class RedisClient:
    """Pipelined commands over one connection, written in the protocol itself: no client library's cost is measured."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fill(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """SET all of them.

        Raises:
            HostError: the server refused one.
        """
        for first in range(0, len(keys), 1024):
            part = range(first, min(first + 1024, len(keys)))
            self._connection.sendall(b"".join(_command(b"SET", keys[i], values[i]) for i in part))
            if self._receive(5 * len(part)) != b"+OK\r\n" * len(part):
                raise HostError("redis refused to store a record", remedy="check its memory limit")

    def get_many(self, request: bytes, count: int) -> bytes:
        """Send get_request() and wait for all of its replies; they are parsed by reply_value() only."""
        self._connection.sendall(request)
        return self._receive(count * _REPLY_BYTES)

    def _receive(self, nbytes: int) -> bytes:
        answer = bytearray(nbytes)
        view, done = memoryview(answer), 0
        while done < nbytes:
            got = self._connection.recv_into(view[done:])
            if got == 0:
                raise HostError("redis closed the connection", remedy="run it again")
            done += got
        return bytes(answer)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def get_request(keys: Sequence[bytes]) -> bytes:
    """The bytes of pipelined GETs."""
    return b"".join(_command(b"GET", key) for key in keys)


def reply_value(answer: bytes, index: int) -> bytes:
    """The value in one reply of get_many()."""
    end = (index + 1) * _REPLY_BYTES - 2
    return answer[end - VALUE_BYTES : end]


def why_not() -> str:
    """Why there is no Redis here; empty if there is one."""
    return "" if shutil.which("redis-server") else "no redis-server: apt install redis-server"


@contextmanager
def redis_client() -> Iterator[RedisClient]:
    """A connection to a server that lives as long as the block.

    Raises:
        HostError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="emu-redis-") as folder:
        path = f"{folder}/redis.sock"
        words = ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        with subprocess.Popen(
            [*words, "--appendonly", "no"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                with _connect(server, path) as connection:
                    yield RedisClient(connection)
            finally:
                server.terminate()


def _connect(server: subprocess.Popen[bytes], path: str) -> socket.socket:
    deadline = time.monotonic() + _START_S
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(path)
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                connection.close()
                raise HostError(
                    "redis-server does not start", remedy="run redis-server by hand to see why"
                ) from None
            time.sleep(0.05)
        else:
            return connection
