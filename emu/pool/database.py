"""The SQLite file beneath a directory: schema, transactions, and its errors as ours."""

from __future__ import annotations

import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emu.errors import HostError, MediumError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 20.0

# A request's generation is its AUTOINCREMENT number: never used twice. `appender` is the lease that may append;
# it counts only while that lease exists. A block's refcount is the number of requests whose table names it;
# `hash` is the chain hash of a published full prompt block, which makes it shareable.
_SCHEMA = """
CREATE TABLE device (
    uuid BLOB NOT NULL, layout BLOB NOT NULL, num_blocks INTEGER NOT NULL,
    formatted INTEGER NOT NULL, clock INTEGER NOT NULL);
CREATE TABLE holders (
    holder INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL, start_time INTEGER NOT NULL, boot TEXT NOT NULL, namespace TEXT NOT NULL);
CREATE TABLE requests (
    generation INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL, state TEXT NOT NULL CHECK (state IN ('reserved', 'published', 'deleted')),
    prompt_tokens INTEGER NOT NULL, num_tokens INTEGER NOT NULL, append_tokens INTEGER NOT NULL,
    shared_tokens INTEGER NOT NULL, blocks BLOB NOT NULL, hashes BLOB NOT NULL, appender INTEGER, last_used INTEGER NOT NULL);
CREATE UNIQUE INDEX request_keys ON requests (key) WHERE state != 'deleted';
CREATE INDEX request_age ON requests (last_used) WHERE state = 'published';
CREATE INDEX request_pending ON requests (generation) WHERE state != 'published';
CREATE TABLE leases (
    lease INTEGER PRIMARY KEY AUTOINCREMENT, generation INTEGER NOT NULL, holder INTEGER NOT NULL);
CREATE INDEX lease_requests ON leases (generation);
CREATE INDEX lease_holders ON leases (holder);
CREATE TABLE blocks (
    block INTEGER PRIMARY KEY, refcount INTEGER NOT NULL DEFAULT 0 CHECK (refcount >= 0), hash BLOB);
CREATE INDEX free_blocks ON blocks (block) WHERE refcount = 0;
CREATE UNIQUE INDEX block_hashes ON blocks (hash) WHERE hash IS NOT NULL;
"""


class Database:
    """One connection.

    A process killed at any moment leaves either the state before or after a transaction: WAL survives that also
    with synchronous=OFF, which gives up only what a power cut would take, and the device's bytes go with it.

    Args:
        path: the file, or "" for memory that no other process sees.
        device: for messages.

    Raises:
        MediumError: not a directory of ours, damaged, or of another version.
        HostError: the file cannot be made there.
    """

    def __init__(self, path: str, device: str) -> None:
        self.path = path
        self.device = device
        try:
            self._connection = sqlite3.connect(
                path or ":memory:",
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            self._set_up()
        except BaseException:
            self._connection.close()
            raise
        self._inode = _inode(path)

    def _set_up(self) -> None:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:  # SQLite does not wait by itself while another process changes the journal mode
            try:
                self._prepare()
            except sqlite3.Error as error:
                if not _busy(error) or time.monotonic() > deadline:
                    raise self._unusable(error) from error
                time.sleep(0.01)
            else:
                return

    def _prepare(self) -> None:
        mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if self.path and mode != "wal":
            raise HostError(
                f"{self.path}: this file system cannot share a directory between processes",
                capability="shared_memory",
                remedy="put the device on tmpfs, for instance under /dev/shm",
            )
        self._connection.execute("PRAGMA synchronous = OFF")
        with self._begin() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise MediumError(
                    f"{self.path}: a directory of version {version}, this emu reads {SCHEMA_VERSION}",
                    device=self.device,
                    status="DIRECTORY_VERSION",
                    remedy=f"remove {self.path} once nobody uses the device",
                )
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside happens or nothing; one process at a time.

        Raises:
            MediumError: the file was replaced, is damaged, or stays locked for BUSY_TIMEOUT_S.
        """
        if self.path and _inode(self.path) != self._inode:
            raise MediumError(
                f"{self.path}: the directory was removed or replaced underneath",
                device=self.device,
                status="DIRECTORY_REPLACED",
                remedy="open the store again",
            )
        try:
            with self._begin() as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    @contextmanager
    def _begin(self) -> Iterator[sqlite3.Connection]:
        self._refuse_second_thread()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _refuse_second_thread(self) -> None:
        if self._connection.in_transaction:
            raise UserError(
                f"{self.device}: two threads use one store", remedy="open one store per thread"
            )

    def close(self) -> None:
        """Close the connection; closing twice is allowed."""
        self._connection.close()

    def _unusable(self, error: sqlite3.Error) -> MediumError:
        status = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
        if _busy(error):
            message = f"{self.path}: another process keeps the directory locked"
            remedy = "look for a stopped process that has the device open"
        else:
            message = f"{self.path or self.device}: the pool's directory is unusable: {error}"
            remedy = "check that the folder is writable and not full"
            if status.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                remedy = "it is damaged: remove it once nobody uses the device"
        return MediumError(message, device=self.device, status=status, remedy=remedy)


def _busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _inode(path: str) -> tuple[int, int] | None:
    if not path:
        return None
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
