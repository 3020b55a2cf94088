"""The server inside a memory node: clients' connections, one native thread per queue pair."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from emu import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PACKET_BYTES = 65536
_MAX_FDS = 3
_CLIENT_ERRORS = (LookupError, TypeError, ValueError, OSError, MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The node's bytes: a memfd, allocated and sealed, and what is known of its place."""

    fd: int
    size_bytes: int
    numa_node: int | None
    numa_bound: bool
    numa_reason: str


@dataclass(slots=True)
class _Client:
    """One connection, and its queue pair once it has asked for one."""

    connection: socket.socket
    responder: _native.Responder | None = None

    def close(self) -> None:
        if self.responder is not None:
            self.responder.close()
        self.responder = None
        self.connection.close()


_Handler: TypeAlias = "Callable[[_Client, dict[str, Any], Sequence[int]], dict[str, Any]]"


class MemoryNode:
    """Serves the control plane in one thread, by readiness; the queue pairs have native threads."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._native_memory = _native.NodeMemory(memory.fd, memory.size_bytes)
        self._ending = False
        self._wake = _wake_on_signals(self._end)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}

    def serve(self, listener: socket.socket, path: Path) -> None:
        """Serve until SIGTERM or SIGINT; then remove the socket at the path."""
        inode = path.stat().st_ino
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(64))
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        try:
            while not self._ending:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            with suppress(FileNotFoundError):
                if (
                    path.stat().st_ino == inode
                ):  # ours: its number stays taken while the listener is open
                    path.unlink()
            listener.close()
            for client in self._clients.values():
                client.close()

    def _end(self, *_: object) -> None:
        self._ending = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client has left, or no descriptor is free: do not spin on it
            time.sleep(0.02)
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._serve_client(client)
        )

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._selector.unregister(client.connection)
        client.close()

    def _serve_client(self, client: _Client) -> None:
        try:
            raw, fds, _, _ = socket.recv_fds(
                client.connection, PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        if not raw:
            self._drop(client)
            return
        try:
            reply = self._answer(client, raw, fds)
        finally:
            for fd in fds:
                os.close(fd)
        try:
            client.connection.send(json.dumps(reply).encode())
        except OSError:  # it left, or does not read its answers
            self._drop(client)

    def _answer(self, client: _Client, raw: bytes, fds: Sequence[int]) -> dict[str, Any]:
        handlers: dict[str, _Handler] = {
            "describe": self._describe,
            "connect": self._connect,
            "register": self._register,
            "deregister": self._deregister,
            "expose": self._expose,
        }
        try:
            message = json.loads(raw)
            return {"ok": True} | handlers[message["op"]](client, message, fds)
        except _CLIENT_ERRORS as error:  # another process's mistake must not end the node
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _describe(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "memory_fd": self._memory.fd,
            "size_bytes": self._memory.size_bytes,
            "numa_node": self._memory.numa_node,
            "numa_bound": self._memory.numa_bound,
            "numa_reason": self._memory.numa_reason,
            "queue_pairs": sum(c.responder is not None for c in self._clients.values()),
        }

    def _connect(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        if client.responder is not None:
            raise ValueError("this connection has its queue pair already")
        client.responder = _native.Responder(
            self._native_memory, list(fds), message["send_queue_depth"], message["max_rd_atomic"]
        )
        return {"max_rd_atomic": client.responder.max_rd_atomic}

    def _register(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        lkey = _responder(client).register_memory(fds[0], message["nbytes"], message["address"])
        return {"lkey": lkey}

    def _deregister(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        _responder(client).deregister_memory(message["lkey"])
        return {}

    def _expose(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        access = set(message["access"])
        if not access <= {"remote_read", "remote_write"}:
            raise ValueError(f"unknown access {sorted(access)}")
        rkey = _responder(client).expose(
            message["offset"], message["nbytes"], "remote_read" in access, "remote_write" in access
        )
        return {"rkey": rkey}


def _wake_on_signals(handler: Callable[..., None]) -> socket.socket:
    """Handle SIGTERM and SIGINT; the socket returned becomes readable, so that a selector wakes."""
    readable, written = socket.socketpair()
    for end in (readable, written):
        end.setblocking(False)
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return readable


def _responder(client: _Client) -> _native.Responder:
    if client.responder is None:
        raise ValueError("connect a queue pair first")
    return client.responder
