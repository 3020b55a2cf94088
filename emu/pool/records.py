"""What a directory says of one request, and reading it within a transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.descriptor_wire import key_bytes
from emu.pool.space import unpack_blocks

if TYPE_CHECKING:
    import sqlite3

STATES = ("reserved", "published", "deleted")
"""Of a request, by the number that the core gives."""


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
        state: one of STATES.
        prompt_tokens: tokens of the prompt's blocks.
        num_tokens: tokens written as of the last publish.
        append_tokens: tokens that may follow the prompt.
        shared_tokens: leading tokens whose blocks were there before it.
        blocks: the block table.
    """

    generation: int
    key: str
    state: str
    prompt_tokens: int
    num_tokens: int
    append_tokens: int
    shared_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A hold on a request: its blocks stay until the lease is released or its process dies."""

    number: int
    entry: Entry


def entry_of(db: sqlite3.Connection, generation: int) -> Entry | None:
    """The request of that number."""
    return _entry(db, "generation = ?", generation)


def live_entry(db: sqlite3.Connection, key: str) -> Entry | None:
    """The reserved or published request of that name.

    Raises:
        UserError: what cannot be a key.
    """
    key_bytes(key)
    return _entry(db, "state != 'deleted' AND key = ?", key)


def tick(db: sqlite3.Connection) -> int:
    """Next value of the clock that orders the uses of requests."""
    (clock,) = db.execute("UPDATE device SET clock = clock + 1 RETURNING clock").fetchone()
    return int(clock)


def _entry(db: sqlite3.Connection, where: str, value: int | str) -> Entry | None:
    row = db.execute(
        "SELECT generation, key, state, prompt_tokens, num_tokens, append_tokens, shared_tokens, blocks"
        f" FROM requests WHERE {where}",
        (value,),
    ).fetchone()
    if row is None:
        return None
    fields = (*row[:-1], unpack_blocks(row[-1]))
    return Entry(*fields)
