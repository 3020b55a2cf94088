"""The Unix socket of a memory node: taking its path, reaching it, and clearing away what a dead node left."""

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


def connect(address: str, timeout_s: float) -> socket.socket:
    """A socket connected to the node at the address.

    Raises:
        UserError: nobody listens there; the remedy is the command that starts a node.
    """
    if not address:
        raise UserError("no memory node's socket was named", remedy=_START.format("PATH"))
    _check_length(address)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise UserError(
            f"no memory node listens at {address}: {error.strerror or error}",
            remedy=_START.format(address),
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
