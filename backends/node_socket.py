"""Where a memory node listens: a path, of which a dead node's socket is cleared away, or a TCP port of a private network."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emu.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_PATH_BYTES = 107  # sun_path, without its terminating zero
_START = "start one: python -m backends.memory_node --socket {} --size 256M"
_START_TCP = "start one there: python -m backends.memory_node --socket PATH --listen {} --size 256M"


def listen(path: Path) -> socket.socket:
    """A listening socket at the path, for this user only; a dead node's socket there is replaced, nothing else.

    Raises:
        UserError: the path is too long, not in a directory, or taken.
    """
    _check_length(os.fspath(path))
    try:
        with _directory_locked(path):
            if not _remove_dead(path):
                raise UserError(
                    f"a memory node listens at {path} already", remedy="use it, or stop it first"
                )
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            previous = os.umask(0o077)
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(previous)
            listener.listen(128)
    except OSError as error:
        raise UserError(
            f"cannot listen at {path}: {error.strerror}",
            remedy="use a directory that you may write",
        ) from error
    listener.setblocking(False)
    return listener


def listen_tcp(address: str) -> socket.socket:
    """A listening socket at HOST:PORT, an IPv4 address of this machine (port 0: the kernel chooses).

    The control plane has no authentication: only a network that is private may lead there.

    Raises:
        UserError: not an address of this machine, or taken.
    """
    host, port = split_address(address)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen at {address}: {error.strerror or error}",
            remedy="use an IPv4 address of this machine and a free port",
        ) from error
    listener.setblocking(False)
    return listener


def is_tcp(address: str) -> bool:
    """Whether an address is HOST:PORT; a path has a slash."""
    return "/" not in address and ":" in address


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT.

    Raises:
        UserError: not such an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError(
            f"{address!r} is not HOST:PORT", remedy="write for instance rdma://host0:7471"
        )
    return host, int(port)


def connect(address: str, timeout_s: float) -> socket.socket:
    """A socket connected to the node at the address, a path or HOST:PORT.

    Raises:
        UserError: nobody listens there; the remedy is the command that starts a node.
    """
    if not address:
        raise UserError("no memory node's socket was named", remedy=_START.format("PATH"))
    remote = is_tcp(address)
    if remote:
        where: tuple[str, int] | str = split_address(address)
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    else:
        _check_length(address)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        where = address
    connection.settimeout(timeout_s)
    try:
        connection.connect(where)
    except OSError as error:
        connection.close()
        raise UserError(
            f"no memory node listens at {address}: {error.strerror or error}",
            remedy=_START_TCP.format(address) if remote else _START.format(address),
        ) from error
    return connection


def _remove_dead(path: Path) -> bool:
    """Remove the socket of a node that is gone; False when somebody listens there.

    Raises:
        UserError: what is there is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} exists and is no socket", remedy="use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return True
    return False


@contextmanager
def _directory_locked(path: Path) -> Iterator[None]:
    """Against another node that starts at the path just now; leaves no lock file behind."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _check_length(path: str) -> None:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UserError(
            f"the socket path {path!r} is longer than {MAX_PATH_BYTES} bytes",
            remedy="use a shorter directory",
        )
