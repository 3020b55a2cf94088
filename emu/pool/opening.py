"""Opening a device: what its first page and its directory say, and what to do about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from emu.errors import LayoutMismatch, MediumError, UserError
from emu.layout import HEADER_BYTES
from emu.pool.header import ForeignHeader, Header, parse_page
from emu.pool.space import leaseholders
from emu.units import format_size

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from emu.layout import KVLayout
    from emu.pool.database import Database
    from emu.pool.medium import Medium


class Action(Enum):
    """What opening has to do."""

    USE = auto()  # device and directory agree with each other and with us
    FORMAT = auto()  # start anew: nobody alive holds anything here
    FINISH = auto()  # the directory is ready, a format was interrupted before the page was written


@dataclass(frozen=True, slots=True)
class Found:
    """What stands on the device and beside it.

    Attributes:
        page: the device's first page.
        directory: what the directory says the page should be, None for a fresh directory.
        formatted: whether the page was written after the directory was set up.
        pids: living processes that hold leases.
    """

    page: bytes
    directory: Header | None
    formatted: bool
    pids: Sequence[int]


def plan_opening(found: Found, layout: KVLayout, device: str, size_bytes: int) -> Action:
    """Decide, without touching anything.

    Raises:
        UserError: the device is too small.
        MediumError: a foreign or damaged page, a pool whose directory is elsewhere, or a device that was replaced
            or cut under living holders.
        LayoutMismatch: living processes hold requests of another layout.
    """
    if layout.num_blocks(size_bytes) == 0:
        raise UserError(
            f"{device}: {size_bytes} bytes do not hold one block of {layout.block_bytes} bytes",
            remedy=f"make it at least {format_size(HEADER_BYTES + layout.block_bytes)}",
        )
    interrupted = found.directory is not None and not found.formatted
    try:
        page = parse_page(found.page)
    except ForeignHeader as error:
        if not interrupted:  # an interrupted format may have left a torn page
            raise MediumError(
                f"{device}: {error}",
                device=device,
                status="FOREIGN_HEADER",
                remedy=f"take another device, make this one anew, or zero its first {HEADER_BYTES} bytes",
            ) from error
        page = None
    if interrupted:
        assert found.directory is not None
        return Action.FINISH if _fits(found.directory, layout, size_bytes) else Action.FORMAT
    if page is not None and page == found.directory and _fits(page, layout, size_bytes):
        return Action.USE
    if page is not None and page != found.directory:
        raise MediumError(
            f"{device}: it holds a pool whose directory is not beside it: another name of the device has it, or it is gone",
            device=device,
            status="DIRECTORY_ELSEWHERE",
            remedy="open it by the name that it was opened by first; where nobody uses it any more, make it anew or "
            f"zero its first {HEADER_BYTES} bytes",
        )
    if found.pids:
        raise _held(found, page, layout, device)
    return Action.FORMAT


def _fits(header: Header, layout: KVLayout, size_bytes: int) -> bool:
    fits = header.num_blocks <= layout.num_blocks(size_bytes)
    return header.layout == layout.fingerprint() and fits


def _held(
    found: Found, page: Header | None, layout: KVLayout, device: str
) -> LayoutMismatch | MediumError:
    holders = _holders(found.pids)
    if page is not None and page == found.directory and page.layout != layout.fingerprint():
        return LayoutMismatch(
            device=device,
            found=page.layout.hex(),
            expected=layout.fingerprint().hex(),
            rows=layout.describe(),
            remedy=f"held by {holders}: close its stores or end it, or use another device",
        )
    return MediumError(
        f"{device}: the device was replaced or cut while requests on it are held by {holders}",
        device=device,
        status="DEVICE_REPLACED",
        remedy="close its stores or end it, or take the testbed down",
    )


def _holders(pids: Sequence[int]) -> str:
    """ "process 7, 9", or that it is the caller."""
    others = ", ".join(str(pid) for pid in pids if pid != os.getpid())
    own = f"this process ({os.getpid()})" if os.getpid() in pids else ""
    return " and ".join(filter(None, (own, others and f"process {others}")))


def open_pool(database: Database, medium: Medium, layout: KVLayout) -> Header:
    """Agree on the pool of a device with everyone who opens it; formats it if that is what it takes.

    Raises:
        UserError, MediumError, LayoutMismatch: as plan_opening().
    """
    while True:
        with database.transaction() as db:
            found = _look(db, medium)
            action = plan_opening(found, layout, medium.name, medium.size_bytes)
            if action is Action.FORMAT:
                _reset(db, layout, layout.num_blocks(medium.size_bytes))
            elif action is Action.FINISH:
                assert found.directory is not None
                medium.write(0, found.directory.to_page())
                db.execute("UPDATE device SET formatted = 1")
            else:
                assert found.directory is not None
                return found.directory


def _look(db: sqlite3.Connection, medium: Medium) -> Found:
    pids = leaseholders(db)
    row = db.execute("SELECT uuid, layout, num_blocks, formatted FROM device").fetchone()
    page = medium.read(0, HEADER_BYTES)
    if row is None:
        return Found(page, None, False, pids)
    return Found(page, Header(*row[:3]), bool(row[3]), pids)


def _reset(db: sqlite3.Connection, layout: KVLayout, num_blocks: int) -> None:
    """Forget everything; the page is written by the next step, so that a kill in between is finished by anyone."""
    for table in ("device", "requests", "leases", "blocks"):
        db.execute(f"DELETE FROM {table}")
    db.execute(
        "INSERT INTO device VALUES (?, ?, ?, 0, 0)",
        (os.urandom(16), layout.fingerprint(), num_blocks),
    )
    db.execute(
        "WITH RECURSIVE n (block) AS (SELECT 0 UNION ALL SELECT block + 1 FROM n WHERE block + 1 < ?)"
        " INSERT INTO blocks (block) SELECT block FROM n",
        (num_blocks,),
    )
