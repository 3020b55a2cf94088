"""A memory node: the process that owns the bytes of an rdma store.

Clients connect to its Unix socket (SOCK_SEQPACKET: one JSON object per packet, file descriptors beside it),
hand over the rings of a queue pair and register memory. The data plane is native: one thread per queue pair.
Run it with `python -m backends.memory_node --socket PATH --size 256M`; it prints "ready" when it listens.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import mmap
import os
import selectors
import signal
import socket
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.host_memory import require_free
from emu import _native
from emu.errors import EmuError, UserError
from emu.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKET_BYTES = 65536
MAX_SOCKET_PATH_BYTES = 107  # sun_path, without its terminating zero
_MAX_FDS = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How to run a node.

    Attributes:
        socket: path of its Unix socket.
        size_bytes: memory that it owns.
        numa_node: bind the memory there, verified; None leaves it to the kernel.
        parent_fd: an inherited pipe; the node ends when it reads end of file. -1: none.
        parent_pid: end with this parent (PR_SET_PDEATHSIG); 0: whoever the parent is now; -1: do not.
    """

    socket: Path
    size_bytes: int
    numa_node: int | None = None
    parent_fd: int = -1
    parent_pid: int = -1


@dataclass(slots=True)
class NodeMemory:
    """The node's bytes: a memfd, allocated and sealed, and what is known of its place."""

    fd: int
    size_bytes: int
    numa_bound: bool
    numa_reason: str


def allocate(size_bytes: int, numa_node: int | None) -> NodeMemory:
    """Make the node's memory, every page of it.

    Raises:
        UserError: a size that cannot be.
        HostError: it does not fit the free memory; nothing was allocated.
    """
    if size_bytes < mmap.PAGESIZE or size_bytes % mmap.PAGESIZE:
        raise UserError(
            f"a memory node of {size_bytes} bytes",
            remedy="use a multiple of 4096, for instance 256M",
        )
    require_free(size_bytes, "the memory node")
    fd = os.memfd_create("emu-memory-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    bound, reason = (False, "") if numa_node is None else _bind(fd, size_bytes, numa_node)
    os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return NodeMemory(fd, size_bytes, bound, reason)


def _bind(fd: int, size_bytes: int, numa_node: int) -> tuple[bool, str]:
    """Set the file's policy while it is empty, so that every page is allocated where it belongs."""
    import numpy as np

    from emu import numa

    with mmap.mmap(fd, size_bytes) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        binding = numa.bind(array, numa_node, fresh=True)
        del array  # an exported buffer keeps the mapping from closing
    return binding.bound, binding.reason


def listen(path: Path) -> socket.socket:
    """A listening socket at the path; a dead node's socket there is replaced, nothing else is.

    Raises:
        UserError: the path is too long, not in a directory, or taken.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"the socket path {str(path)!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes",
            remedy="use a shorter directory",
        )
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"cannot use {path.parent}: {error.strerror}", remedy="make it first"
        ) from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # against another node that starts here now
        _remove_dead(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        previous = os.umask(0o077)  # only this user may connect
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(previous)
        listener.listen(128)
    except OSError as error:
        raise UserError(f"cannot listen at {path}: {error.strerror}") from error
    finally:
        os.close(directory)
    listener.setblocking(False)
    return listener


def _remove_dead(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} exists and is no socket", remedy="use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UserError(f"a memory node listens at {path} already", remedy="use it, or stop it first")


@dataclass(slots=True)
class _Client:
    """One connection, and its queue pair once it has asked for one."""

    connection: socket.socket
    responder: _native.Responder | None = None
    lkeys: set[int] = field(default_factory=set)

    def close(self) -> None:
        if self.responder is not None:
            self.responder.close()
        self.responder = None
        self.connection.close()


class MemoryNode:
    """Serves the control plane in one thread, by readiness; the queue pairs have native threads."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._memory = allocate(options.size_bytes, options.numa_node)
        self._native_memory = _native.NodeMemory(self._memory.fd, options.size_bytes)
        self._ending = False
        self._wake = _wake_on_signals(self._end)
        self._listener = listen(options.socket)
        self._inode = options.socket.stat().st_ino
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the parent's pipe ends; then remove the socket."""
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(64))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self._options.parent_fd >= 0:
            self._selector.register(
                self._options.parent_fd, selectors.EVENT_READ, self._parent_readable
            )
        try:
            print("ready", flush=True)  # noqa: T201 - the starter waits for this line
            while not self._ending:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self._close()

    def _end(self, *_: object) -> None:
        self._ending = True

    def _parent_readable(self) -> None:
        if not os.read(self._options.parent_fd, 64):
            self._ending = True

    def _close(self) -> None:
        for client in list(self._clients.values()):
            client.close()
        self._listener.close()
        path = self._options.socket
        with suppress(FileNotFoundError):
            if path.stat().st_ino == self._inode:
                path.unlink()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client went away again, or no descriptor is left: serve the others
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
        handlers: dict[str, Callable[[_Client, dict[str, Any], Sequence[int]], dict[str, Any]]] = {
            "describe": self._describe,
            "connect": self._connect,
            "register": self._register,
            "deregister": self._deregister,
            "expose": self._expose,
        }
        try:
            message = json.loads(raw)
            return {"ok": True} | handlers[message["op"]](client, message, fds)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OSError,
            MemoryError,
            RuntimeError,
        ) as error:
            # Another process's mistake must not end the node.
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _describe(
        self, client: _Client, message: dict[str, Any], fds: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "memory_fd": self._memory.fd,
            "size_bytes": self._memory.size_bytes,
            "numa_node": self._options.numa_node,
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


def die_with_parent(parent_pid: int) -> None:
    """Be sent SIGTERM when the parent ends (strictly: the thread that started us).

    Raises:
        UserError: it has ended already.
    """
    before = parent_pid or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != before:
        raise UserError("the parent process is gone")


def parse_arguments(arguments: Sequence[str] | None = None) -> NodeOptions:
    """Options of the command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m backends.memory_node", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path, help="path of the Unix socket")
    parser.add_argument("--size", required=True, help="bytes, or for instance 256M")
    parser.add_argument("--numa-node", type=int, help="bind the memory to this node")
    parser.add_argument("--parent-fd", type=int, default=-1, help="end when this pipe ends")
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        default=-1,
        metavar="PID",
        help="end with the parent process (PID guards against one that has ended already)",
    )
    given = parser.parse_args(arguments)
    try:
        size_bytes = parse_size(given.size)
    except UserError as error:
        parser.error(str(error))
    return NodeOptions(
        given.socket.absolute(), size_bytes, given.numa_node, given.parent_fd, given.die_with_parent
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        if options.parent_pid >= 0:
            die_with_parent(options.parent_pid)
        node = MemoryNode(options)
    except EmuError as error:
        print(f"memory node: {error}", file=sys.stderr)  # noqa: T201
        return 1
    node.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
