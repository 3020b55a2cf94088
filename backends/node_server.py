"""The server inside a memory node: clients' connections, one native thread per queue pair.

A queue pair is a pair of rings (any client on this machine) or a device's (verbs; clients anywhere).
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from backends.node_channel import Channel, ChannelEnded
from backends.node_verbs import endpoint_from_json, endpoint_to_json, open_device
from emu import _native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_CLIENT_ERRORS = (LookupError, TypeError, ValueError, OSError, MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The node's bytes: a memfd, allocated and sealed, or a device, and what is known of their place.

    Attributes:
        fd: of the memfd or device.
        size_bytes: what is served.
        numa_node, numa_bound, numa_reason: where it should lie, whether it does, and why not.
        device_bytes: the device's whole size, 0 for a memfd.
    """

    fd: int
    size_bytes: int
    numa_node: int | None = None
    numa_bound: bool = False
    numa_reason: str = ""
    device_bytes: int = 0

    def map(self) -> _native.NodeMemory:
        """The same, mapped."""
        if self.device_bytes:
            return _native.NodeMemory(self.fd, self.size_bytes, self.device_bytes)
        return _native.NodeMemory(self.fd, self.size_bytes)


@dataclass(slots=True)
class _Client:
    """One connection, and its queue pair once it has asked for one.

    Attributes:
        machine: that keeps the pool's directory, if this client uses one.
    """

    channel: Channel
    responder: _native.Responder | _native.RcOwner | None = None
    machine: str = ""

    def disconnect(self) -> None:
        """Drop the queue pair, and with it what was registered."""
        if self.responder is not None:
            self.responder.close()
        self.responder = None

    def close(self) -> None:
        """Drop everything."""
        self.disconnect()
        self.channel.close()


_Handler: TypeAlias = "Callable[[_Client, dict[str, Any], Sequence[int]], dict[str, Any]]"


class MemoryNode:
    """Serves the control plane in one thread, by readiness; the queue pairs have native threads."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._native_memory = memory.map()
        self._ending = False
        self._wake = _wake_on_signals(self._end)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}

    def serve(self, listeners: Sequence[socket.socket], path: Path) -> None:
        """Serve until SIGTERM or SIGINT; then remove the socket at the path."""
        inode = path.stat().st_ino
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(64))
        for listener in listeners:
            accept = functools.partial(self._accept, listener)
            self._selector.register(listener, selectors.EVENT_READ, accept)
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
            for listener in listeners:
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
        client = _Client(Channel(connection))
        self._clients[connection.fileno()] = client
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._serve_client(client)
        )

    def _drop(self, client: _Client) -> None:
        del self._clients[client.channel.sock.fileno()]
        self._selector.unregister(client.channel.sock)
        client.close()

    def _serve_client(self, client: _Client) -> None:
        try:
            messages = client.channel.receive()
        except BlockingIOError:
            return
        except (ChannelEnded, OSError):
            self._drop(client)
            return
        for raw, fds in messages:
            try:
                reply = self._answer(client, raw, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            try:
                client.channel.send(reply)
            except OSError:  # it left, or does not read its answers
                self._drop(client)
                return

    def _answer(self, client: _Client, raw: bytes, fds: Sequence[int]) -> dict[str, Any]:
        handlers: dict[str, _Handler] = {
            "describe": self._describe,
            "claim": self._claim,
            "connect": self._connect,
            "connect_verbs": self._connect_verbs,
            "disconnect": self._disconnect,
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

    def _claim(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        """Let one machine at a time keep the pool's directory: two would hand out the same blocks."""
        machine = str(message["machine"])
        others = {c.machine for c in self._clients.values()} - {"", machine}
        if not others:
            client.machine = machine
        return {"granted": not others}

    def _connect(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        _refuse_second(client)
        responder = _native.Responder(
            self._native_memory, list(fds), message["send_queue_depth"], message["max_rd_atomic"]
        )
        client.responder = responder
        return {"max_rd_atomic": responder.max_rd_atomic}

    def _connect_verbs(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        _refuse_second(client)
        sock = client.channel.sock
        nearest = message["address"] if client.channel.carries_fds else sock.getsockname()[0]
        device = open_device(nearest)
        reads = max(1, min(message["max_rd_atomic"], device.max_reads_answered, 255))
        owner = _native.RcOwner(self._native_memory, device, message["timeout_s"])
        owner.connect(endpoint_from_json(message["endpoint"]), reads)
        client.responder = owner
        return {"endpoint": endpoint_to_json(owner.endpoint), "max_rd_atomic": reads}

    def _disconnect(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        """Drop the queue pair: the client takes another one."""
        client.disconnect()
        return {}

    def _register(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        lkey = _ring(client).register_memory(fds[0], message["nbytes"], message["address"])
        return {"lkey": lkey}

    def _deregister(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        _ring(client).deregister_memory(message["lkey"])
        return {}

    def _expose(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        access = set(message["access"])
        if not access <= {"remote_read", "remote_write"}:
            raise ValueError(f"unknown access {sorted(access)}")
        if client.responder is None:
            raise ValueError("connect a queue pair first")
        where = (message["offset"], message["nbytes"])
        keys = client.responder.expose(*where, "remote_read" in access, "remote_write" in access)
        rkey, address = keys if isinstance(keys, tuple) else (keys, 0)
        return {"rkey": rkey, "address": address}


def _wake_on_signals(handler: Callable[..., None]) -> socket.socket:
    """Handle SIGTERM and SIGINT; the socket returned becomes readable, so that a selector wakes."""
    readable, written = socket.socketpair()
    for end in (readable, written):
        end.setblocking(False)
    signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return readable


def _refuse_second(client: _Client) -> None:
    if client.responder is not None:
        raise ValueError("this connection has its queue pair already")


def _ring(client: _Client) -> _native.Responder:
    if not isinstance(client.responder, _native.Responder):
        raise ValueError("connect a queue pair of rings first")  # noqa: TRY004 - the client's mistake
    return client.responder
