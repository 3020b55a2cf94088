"""Blocks and leases within one transaction: take, share, give back, evict, reclaim from the dead."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from emu.process import ProcessId

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

HASH_BYTES = 16


class NoRoom(Exception):
    """Fewer blocks than needed, even after everything that nobody holds was evicted.

    Args:
        free: blocks that are free then.
    """

    def __init__(self, free: int) -> None:
        super().__init__(free)
        self.free = free


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """A block table as the directory keeps it."""
    return array("i", blocks).tobytes()


def unpack_blocks(raw: bytes) -> tuple[int, ...]:
    """The opposite of pack_blocks()."""
    return tuple(array("i", raw))


def share_prefix(db: sqlite3.Connection, hashes: Sequence[bytes]) -> list[int]:
    """Hold the blocks of the leading run of hashes that are published here; returns their numbers."""
    run: list[int] = []
    for block_hash in hashes:
        row = db.execute("SELECT block FROM blocks WHERE hash = ?", (block_hash,)).fetchone()
        if row is None:
            break
        run.append(row[0])
    db.executemany("UPDATE blocks SET refcount = refcount + 1 WHERE block = ?", ((b,) for b in run))
    return run


def take_blocks(db: sqlite3.Connection, count: int) -> list[int]:
    """Take free blocks, reclaiming from dead processes and evicting the least recently used when short.

    Raises:
        NoRoom: the caller must roll back.
    """
    free = _free_blocks(db, count)
    if len(free) < count:
        reap(db)
        free = _free_blocks(db, count)
    while len(free) < count:
        if not _evict_one(db):
            raise NoRoom(len(free))
        free = _free_blocks(db, count)
    db.executemany("UPDATE blocks SET refcount = 1 WHERE block = ?", ((b,) for b in free))
    return free


def _free_blocks(db: sqlite3.Connection, limit: int) -> list[int]:
    rows = db.execute(
        "SELECT block FROM blocks WHERE refcount = 0 ORDER BY block LIMIT ?", (limit,)
    )
    return [row[0] for row in rows]


def _evict_one(db: sqlite3.Connection) -> bool:
    row = db.execute(
        "SELECT generation FROM requests WHERE state = 'published'"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.generation = requests.generation)"
        " ORDER BY last_used LIMIT 1"
    ).fetchone()
    if row is not None:
        drop_request(db, row[0])
    return row is not None


def drop_request(db: sqlite3.Connection, generation: int) -> None:
    """Forget a request that nobody holds; blocks that no other request names become free."""
    (raw,) = db.execute(
        "SELECT blocks FROM requests WHERE generation = ?", (generation,)
    ).fetchone()
    db.executemany(
        "UPDATE blocks SET refcount = refcount - 1,"
        " hash = CASE WHEN refcount = 1 THEN NULL ELSE hash END WHERE block = ?",
        ((block,) for block in unpack_blocks(raw)),
    )
    db.execute("DELETE FROM requests WHERE generation = ?", (generation,))


def settle(db: sqlite3.Connection) -> None:
    """After leases went: drop what was deleted, or reserved and never published, and nobody holds now."""
    rows = db.execute(
        "SELECT generation FROM requests WHERE state != 'published'"
        " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.generation = requests.generation)"
    ).fetchall()
    for (generation,) in rows:
        drop_request(db, generation)


def reap(db: sqlite3.Connection) -> None:
    """Take back the leases of dead processes."""
    rows = db.execute("SELECT holder, pid, start_time, boot, namespace FROM holders").fetchall()
    dead = [(holder,) for holder, *process in rows if not ProcessId(*process).alive()]
    if dead:
        drop_holders(db, dead)


def drop_holders(db: sqlite3.Connection, holders: Sequence[tuple[int]]) -> None:
    """Forget holders and their leases."""
    db.executemany("DELETE FROM leases WHERE holder = ?", holders)
    db.executemany("DELETE FROM holders WHERE holder = ?", holders)
    settle(db)


def leaseholders(db: sqlite3.Connection) -> list[int]:
    """Pids of the living processes that hold leases; reclaims from the dead first."""
    reap(db)
    rows = db.execute("SELECT DISTINCT pid FROM holders JOIN leases USING (holder) ORDER BY pid")
    return [row[0] for row in rows]
