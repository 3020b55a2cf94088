"""The directory of one device: which requests lie there, on which blocks, and who holds them.

Every call is one transaction on the SQLite file beside the device; any number of processes may use it, and any
of them may be killed at any moment.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from emu.descriptor_wire import MAX_GENERATION
from emu.errors import KeyExists, KeyMissing, MediumError, StaleDescriptor, StoreFull, UserError
from emu.pool import records, space
from emu.pool.database import Database
from emu.pool.opening import open_pool
from emu.pool.records import Entry, Lease, Wanted
from emu.process import ProcessId

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from emu.layout import KVLayout
    from emu.pool.medium import Medium
    from emu.store import Descriptor


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
        process = ProcessId.current()
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

    lines_flushed = 0  # of metadata: a file needs none

    def abandon(self) -> None:
        """Nothing: a forked child leaves its parent's connection alone."""

    def validate(self) -> None:
        """Nothing: what a living process holds is never taken from it."""

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
            "INSERT INTO requests (key, state, prompt_tokens, num_tokens, append_tokens, shared_tokens, blocks,"
            " hashes, last_used) VALUES (?, 'reserved', ?, ?, ?, ?, ?, ?, ?)",
            (
                want.key,
                want.num_tokens,
                shared_tokens,
                want.append_tokens,
                shared_tokens,
                space.pack_blocks(blocks),
                b"".join(want.block_hashes),
                records.tick(db),
            ),
        ).lastrowid
        assert generation is not None
        lease = self._add_lease(db, generation)
        db.execute(
            "UPDATE requests SET appender = ? WHERE generation = ?", (lease.number, generation)
        )
        return lease

    def _check_key_free(self, db: sqlite3.Connection, key: str) -> None:
        entry = records.live_entry(db, key)
        if entry is not None and entry.state == "reserved":
            space.reap(db)  # whoever was writing it may be dead
            entry = records.live_entry(db, key)
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
            (num_tokens, appender, records.tick(db), entry.generation),
        )
        self._make_shareable(db, entry, num_tokens)

    def _make_shareable(self, db: sqlite3.Connection, entry: Entry, num_tokens: int) -> None:
        """Name the full, written prompt blocks by their hashes; one that is here already keeps its name."""
        size = space.HASH_BYTES
        (raw,) = db.execute(
            "SELECT hashes FROM requests WHERE generation = ?", (entry.generation,)
        ).fetchone()
        full = min(
            len(raw) // size, min(num_tokens, entry.prompt_tokens) // self._layout.block_tokens
        )
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
                entry = records.live_entry(db, key)
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
        """Take a lease on each published request; None where there is none."""
        with self._transaction() as db:
            entries = [records.live_entry(db, key) for key in keys]
            return [
                self._add_lease(db, entry.generation)
                if entry is not None and entry.state == "published"
                else None
                for entry in entries
            ]

    def attach(self, descriptor: Descriptor) -> Lease:
        """Take a lease on what a descriptor names.

        Raises:
            StaleDescriptor: it is gone, or was on another pool.
        """
        with self._transaction() as db:
            known = 0 <= descriptor.generation <= MAX_GENERATION
            entry = records.entry_of(db, descriptor.generation) if known else None
            if (
                descriptor.device != self.pool.uuid
                or entry is None
                or entry.state != "published"
                or (entry.key, entry.blocks) != (descriptor.key, descriptor.blocks)
            ):
                raise StaleDescriptor(
                    device=self.device,
                    key=descriptor.key,
                    generation=descriptor.generation,
                    belongs_to=descriptor.device.hex(),
                    uuid=self.pool.uuid.hex(),
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
            "UPDATE requests SET last_used = ? WHERE generation = ?", (records.tick(db), generation)
        )
        entry = records.entry_of(db, generation)
        assert number is not None
        assert entry is not None
        return Lease(number, entry)

    def _leased(self, db: sqlite3.Connection, lease: int) -> tuple[Entry, int | None]:
        """The request of a lease, and the lease that may append to it, if one does."""
        row = db.execute("SELECT generation FROM leases WHERE lease = ?", (lease,)).fetchone()
        entry = None if row is None else records.entry_of(db, row[0])
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
        entry = records.live_entry(db, key)
        if entry is None or (entry.state == "reserved" and not self._holds(db, entry)):
            return None
        return entry
