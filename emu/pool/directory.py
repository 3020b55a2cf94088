"""The directory of one device: which requests lie there, on which blocks, and who holds them.

Every call is one transaction on the SQLite file beside the device; any number of processes may use it, and any
of them may be killed at any moment.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import KeyExists, KeyMissing, MediumError, StaleDescriptor, StoreFull, UserError
from emu.pool import space
from emu.pool.database import Database
from emu.pool.opening import open_pool
from emu.pool.process import Process
from emu.pool.wire import key_bytes

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from emu.layout import KVLayout
    from emu.pool.medium import Medium
    from emu.store import Descriptor


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to reserve; the fields are KVStore.reserve()'s arguments."""

    key: str
    num_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    append_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What the directory knows of one request.

    Attributes:
        generation: its number, never used twice.
        key: its key.
        state: "reserved", "published" or "deleted".
        prompt_tokens: tokens of the prompt's blocks.
        num_tokens: tokens written as of the last publish.
        shared_tokens: leading tokens whose blocks were there before it.
        blocks: the block table.
    """

    generation: int
    key: str
    state: str
    prompt_tokens: int
    num_tokens: int
    shared_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A hold on a request: its blocks stay until the lease is released or its process dies."""

    number: int
    entry: Entry


class Directory:
    """One store's view of its device's directory.

    Raises:
        UserError, MediumError, LayoutMismatch, HostError: the device cannot be used; see open_pool().
    """

    def __init__(self, medium: Medium, layout: KVLayout) -> None:
        self.device = medium.name
        self._layout = layout
        self._database = Database(medium.directory_path, medium.name)
        try:
            self.pool = open_pool(self._database, medium, layout)
            self._holder = self._register()
        except BaseException:
            self._database.close()
            raise

    def _register(self) -> int:
        process = Process.current()
        with self._transaction() as db:
            holder = db.execute(
                "INSERT INTO holders (pid, start_time, boot, namespace) VALUES (?, ?, ?, ?)",
                (process.pid, process.start_time, process.boot, process.namespace),
            ).lastrowid
        assert holder is not None
        return holder

    def close(self) -> None:
        """Release every lease of this store; a directory that was removed meanwhile is no error."""
        try:
            with self._transaction() as db:
                space.drop_holders(db, [(self._holder,)])
        except MediumError:
            pass  # removed with its testbed, or formatted anew: nothing of ours is left in it
        finally:
            self._database.close()

    def abandon(self) -> None:
        """Forget the directory in a forked child, whose parent keeps the leases and the connection."""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._database.transaction() as db:
            row = db.execute("SELECT uuid FROM device").fetchone()
            if row is None or row[0] != self.pool.uuid:
                raise MediumError(
                    f"{self.device}: another process has formatted the device anew",
                    device=self.device,
                    status="POOL_REPLACED",
                    remedy="open the store again",
                )
            yield db

    # -- writing ------------------------------------------------------------------------------------------
    def reserve(self, wanted: Sequence[Wanted]) -> list[Lease]:
        """Make room for all of them or for none.

        Raises:
            KeyExists, StoreFull, UserError: nothing was changed.
        """
        with self._transaction() as db:
            return [self._reserve(db, want) for want in wanted]

    def _reserve(self, db: sqlite3.Connection, want: Wanted) -> Lease:
        self._check_key_free(db, want.key)
        run = space.share_prefix(db, want.block_hashes)
        fresh = self._layout.blocks_for(want.num_tokens) - len(run)
        fresh += self._layout.blocks_for(want.append_tokens)
        try:
            blocks = run + space.take_blocks(db, fresh)
        except space.NoRoom as error:
            raise StoreFull(
                device=self.device,
                needed_bytes=fresh * self._layout.block_bytes,
                free_bytes=error.free * self._layout.block_bytes,
                capacity_bytes=self.pool.num_blocks * self._layout.block_bytes,
            ) from None
        shared_tokens = len(run) * self._layout.block_tokens
        generation = db.execute(
            "INSERT INTO requests (key, state, prompt_tokens, num_tokens, shared_tokens, blocks, hashes, last_used)"
            " VALUES (?, 'reserved', ?, ?, ?, ?, ?, ?)",
            (
                want.key,
                want.num_tokens,
                shared_tokens,
                shared_tokens,
                space.pack_blocks(blocks),
                b"".join(want.block_hashes),
                _tick(db),
            ),
        ).lastrowid
        assert generation is not None
        lease = self._add_lease(db, generation)
        db.execute(
            "UPDATE requests SET appender = ? WHERE generation = ?", (lease.number, generation)
        )
        return lease

    def _check_key_free(self, db: sqlite3.Connection, key: str) -> None:
        key_bytes(key)
        entry = _live_entry(db, key)
        if entry is not None and entry.state == "reserved":
            space.reap(db)  # whoever was writing it may be dead
            entry = _live_entry(db, key)
        if entry is not None:
            raise KeyExists(key, device=self.device)

    def publish(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Make requests visible, or refresh what they hold.

        The first publish frees the right to append. Later ones count only from the lease that has it.

        Args:
            lengths: (lease number, tokens that every region holds) for each.

        Raises:
            KeyMissing: the request was deleted; nothing of the batch was published.
        """
        with self._transaction() as db:
            for lease, num_tokens in lengths:
                self._publish(db, lease, num_tokens)

    def _publish(self, db: sqlite3.Connection, lease: int, num_tokens: int) -> None:
        entry, appender = self._leased(db, lease)
        if entry.state == "deleted":
            raise KeyMissing(entry.key, device=self.device)
        if entry.state == "reserved":
            appender = None
        elif appender != lease:
            return
        db.execute(
            "UPDATE requests SET state = 'published', num_tokens = ?, appender = ?, last_used = ?"
            " WHERE generation = ?",
            (num_tokens, appender, _tick(db), entry.generation),
        )
        self._make_shareable(db, entry, num_tokens)

    def _make_shareable(self, db: sqlite3.Connection, entry: Entry, num_tokens: int) -> None:
        """Name the full, written prompt blocks by their hashes; one that is here already keeps its name."""
        size = space.HASH_BYTES
        (raw,) = db.execute(
            "SELECT hashes FROM requests WHERE generation = ?", (entry.generation,)
        ).fetchone()
        full = min(len(raw) // size, min(num_tokens, entry.prompt_tokens) // self._layout.block_tokens)
        db.executemany(
            "UPDATE OR IGNORE blocks SET hash = ? WHERE block = ? AND hash IS NULL",
            ((raw[i * size : (i + 1) * size], entry.blocks[i]) for i in range(full)),
        )

    def take_append_right(self, lease: int, num_tokens: int) -> None:
        """Become the one that may append.

        Args:
            lease: the caller's lease.
            num_tokens: the published tokens that the caller knows of.

        Raises:
            UserError: another lease has the right, or the request has grown since the caller attached.
        """
        with self._transaction() as db:
            entry, appender = self._leased(db, lease)
            if appender not in (None, lease):
                space.reap(db)
                entry, appender = self._leased(db, lease)
            if appender not in (None, lease):
                raise UserError(
                    f"{self.device}: another attacher appends to request {entry.key!r}",
                    remedy="one attacher at a time may append; wait until it detaches",
                )
            if entry.num_tokens != num_tokens:
                raise UserError(
                    f"{self.device}: request {entry.key!r} has grown to {entry.num_tokens} tokens,"
                    f" this attachment knows of {num_tokens}",
                    remedy="detach and attach again before appending",
                )
            db.execute(
                "UPDATE requests SET appender = ? WHERE generation = ?", (lease, entry.generation)
            )

    def delete(self, keys: Sequence[str]) -> list[int]:
        """Forget published requests and own reserved ones; returns their generations.

        This store's leases on them go at once; the blocks return with the last lease of others.
        """
        gone: list[int] = []
        with self._transaction() as db:
            for key in keys:
                entry = _live_entry(db, key)
                if entry is None or (entry.state == "reserved" and not self._holds(db, entry)):
                    continue
                db.execute(
                    "UPDATE requests SET state = 'deleted' WHERE generation = ?",
                    (entry.generation,),
                )
                db.execute(
                    "DELETE FROM leases WHERE generation = ? AND holder = ?",
                    (entry.generation, self._holder),
                )
                gone.append(entry.generation)
            space.settle(db)
        return gone

    # -- reading ------------------------------------------------------------------------------------------
    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        """The published requests of these names, and own reserved ones; None where there is none."""
        with self._transaction() as db:
            return [self._visible(db, key) for key in keys]

    def lease(self, keys: Sequence[str]) -> list[Lease | None]:
        """Take a lease on each published request, or own reserved one; None where there is none."""
        with self._transaction() as db:
            entries = [self._visible(db, key) for key in keys]
            return [None if e is None else self._add_lease(db, e.generation) for e in entries]

    def attach(self, descriptor: Descriptor) -> Lease:
        """Take a lease on what a descriptor names.

        Raises:
            StaleDescriptor: it is gone, or was on another pool.
        """
        with self._transaction() as db:
            entry = _entry(db, "generation = ?", descriptor.generation)
            if (
                descriptor.device != self.pool.uuid
                or entry is None
                or entry.state != "published"
                or (entry.key, entry.blocks) != (descriptor.key, descriptor.blocks)
            ):
                raise StaleDescriptor(
                    device=self.device, key=descriptor.key, generation=descriptor.generation
                )
            return self._add_lease(db, entry.generation)

    def release(self, leases: Sequence[int]) -> None:
        """Drop leases; a deleted request's blocks return with the last one."""
        with self._transaction() as db:
            db.executemany("DELETE FROM leases WHERE lease = ?", ((lease,) for lease in leases))
            space.settle(db)

    def used_blocks(self) -> int:
        """Blocks that some request names, after taking back what dead processes held."""
        with self._transaction() as db:
            space.reap(db)
            (used,) = db.execute("SELECT count(*) FROM blocks WHERE refcount > 0").fetchone()
            return int(used)

    # -- within a transaction -------------------------------------------------------------------------------
    def _add_lease(self, db: sqlite3.Connection, generation: int) -> Lease:
        number = db.execute(
            "INSERT INTO leases (generation, holder) VALUES (?, ?)", (generation, self._holder)
        ).lastrowid
        db.execute(
            "UPDATE requests SET last_used = ? WHERE generation = ?", (_tick(db), generation)
        )
        entry = _entry(db, "generation = ?", generation)
        assert number is not None
        assert entry is not None
        return Lease(number, entry)

    def _leased(self, db: sqlite3.Connection, lease: int) -> tuple[Entry, int | None]:
        """The request of a lease, and the lease that may append to it, if one does."""
        row = db.execute("SELECT generation FROM leases WHERE lease = ?", (lease,)).fetchone()
        entry = None if row is None else _entry(db, "generation = ?", row[0])
        if entry is None:
            raise MediumError(
                f"{self.device}: lease {lease} was taken away",
                device=self.device,
                status="LEASE_LOST",
                remedy="open the store again",
            )
        (appender,) = db.execute(
            "SELECT (SELECT lease FROM leases WHERE lease = appender) FROM requests WHERE generation = ?",
            (entry.generation,),
        ).fetchone()
        return entry, appender

    def _holds(self, db: sqlite3.Connection, entry: Entry) -> bool:
        row = db.execute(
            "SELECT 1 FROM leases WHERE generation = ? AND holder = ?",
            (entry.generation, self._holder),
        ).fetchone()
        return row is not None

    def _visible(self, db: sqlite3.Connection, key: str) -> Entry | None:
        entry = _live_entry(db, key)
        if entry is None or (entry.state == "reserved" and not self._holds(db, entry)):
            return None
        return entry


def _entry(db: sqlite3.Connection, where: str, value: int | str) -> Entry | None:
    row = db.execute(
        "SELECT generation, key, state, prompt_tokens, num_tokens, shared_tokens, blocks"
        f" FROM requests WHERE {where}",
        (value,),
    ).fetchone()
    return None if row is None else Entry(*row[:6], blocks=space.unpack_blocks(row[6]))


def _live_entry(db: sqlite3.Connection, key: str) -> Entry | None:
    return _entry(db, "state != 'deleted' AND key = ?", key)


def _tick(db: sqlite3.Connection) -> int:
    """Next value of the clock that orders the uses of requests."""
    (clock,) = db.execute("UPDATE device SET clock = clock + 1 RETURNING clock").fetchone()
    return int(clock)
