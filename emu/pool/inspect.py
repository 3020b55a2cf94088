"""A pool seen from outside, without joining it: what `emu pool` shows, checks and repairs."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emu import _native
from emu.devdax import devdax_bytes
from emu.errors import MediumError, UserError
from emu.layout import HEADER_BYTES
from emu.pool.header import MAGIC, VERSION
from emu.pool.medium import MappedMemory
from emu.pool.records import STATES
from emu.pool.shared_opening import check_sizes, machine_lock, native_pool, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu.pool.header import Header
    from emu.store import Rows

_SEATS = ("free", "taken", "quarantined")


@dataclass(frozen=True, slots=True)
class Member:
    """A slot of the pool and who has it.

    Attributes:
        slot, epoch: the slot, and how often somebody has taken it.
        seat: "free", "taken" or "quarantined".
        pid: of the last one who had it, in that one's own pid namespace.
        gone: whether that one is certainly not there any more.
        leases: what it holds.
        log_lines: lines that its log has seen.
    """

    slot: int
    epoch: int
    seat: str
    pid: int
    gone: bool
    leases: int
    log_lines: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request in a pool; last_used orders the uses of all of them, named_blocks can be shared by their hashes."""

    generation: int
    key: str
    state: str
    prompt_tokens: int
    num_tokens: int
    shared_tokens: int
    blocks: tuple[int, ...]
    leases: int
    appending: bool
    last_used: int
    named_blocks: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a pool holds, and what is wrong with it.

    Attributes:
        device: its path.
        header: of its first page.
        transactions: the number of the last one.
        members: slots that somebody has had.
        requests: by generation.
        problems: damage; empty in a sound pool.
        notes: traces of kills, which mean nothing.
    """

    device: str
    header: Header
    transactions: int
    members: tuple[Member, ...]
    requests: tuple[Request, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def used_blocks(self) -> int:
        """Blocks that some request names; a shared one counts once."""
        return len({block for request in self.requests for block in request.blocks})

    @property
    def alive(self) -> list[Member]:
        """Those who may still have the pool open."""
        return [one for one in self.members if one.pid and not one.gone]

    def to_json(self) -> dict[str, Any]:
        """Everything, for `emu pool dump --json`."""
        sizes = self.header.metadata
        return {
            "device": self.device,
            "format": MAGIC.decode(),
            "version": VERSION,
            "uuid": self.header.uuid.hex(),
            "layout": self.header.layout.hex(),
            "block_tokens": self.header.block_tokens,
            "num_blocks": self.header.num_blocks,
            "used_blocks": self.used_blocks,
            "meta_offset_bytes": self.header.meta_offset,
            "meta_bytes": sizes.nbytes,
            "slots": sizes.slots,
            "transactions": self.transactions,
            "members": [asdict(one) for one in self.members],
            "requests": [asdict(one) for one in self.requests],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


def inspect(path: str) -> Inspection:
    """Read a pool.

    Raises:
        UserError: no such device, or nothing on it yet.
        MediumError: a foreign, older or damaged first page, or a device that was cut.
    """
    with _mapped(path) as mapped:
        header = _header(path, mapped)
        with machine_lock(mapped, path):
            return _inspection(path, header, _offline(mapped, header))


def repair(path: str, *, force: bool = False) -> tuple[Inspection, Inspection]:
    """Write a damaged pool anew from what can be read of it; returns what was found, and what is there now.

    Args:
        path: of the device.
        force: although somebody seems to have it open.

    Raises:
        UserError, MediumError: as inspect(); or somebody has it open.
    """
    with _mapped(path) as mapped:
        header = _header(path, mapped)
        with machine_lock(mapped, path):
            pool = _offline(mapped, header)
            before = _inspection(path, header, pool)
            if not before.problems:
                return before, before
            _refuse_alive(before, force=force)
            pool.repair()
            return before, _inspection(path, header, _offline(mapped, header))


def clear(path: str, *, force: bool = False) -> None:
    """Give up whatever is on a device: its first page is zero afterwards, the next store formats it.

    Raises:
        UserError: no such device.
        MediumError: somebody has it open.
    """
    with _mapped(path) as mapped, machine_lock(mapped, path):
        if not force:
            try:
                header = _header(path, mapped)
            except (MediumError, UserError):
                header = None  # nobody can use it
            if header is not None:
                _refuse_alive(_inspection(path, header, _offline(mapped, header)), force=False)
        mapped.memory[:HEADER_BYTES] = 0
        _native.writeback(mapped.memory, 0, HEADER_BYTES)


def _refuse_alive(found: Inspection, *, force: bool) -> None:
    if found.alive and not force:
        listed = ", ".join(f"{one.pid} (slot {one.slot})" for one in found.alive)
        raise MediumError(
            f"{found.device}: process {listed} may have it open",
            device=found.device,
            status="POOL_OPEN",
            remedy="end it first; --force if it was on a machine that is gone",
        )


@contextmanager
def _mapped(path: str) -> Iterator[MappedMemory]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be opened: {error.strerror}", remedy="`emu status` lists the devices"
        ) from error
    try:
        nbytes = _size(path, fd)
        memory = mmap.mmap(fd, nbytes)
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            array: Rows = np.frombuffer(memory, np.uint8)
            yield MappedMemory(array, fd, fd if regular else -1, coherent=False)
        finally:
            with suppress(
                BufferError
            ):  # an error on its way still looks into it; it goes with that
                memory.close()
    finally:
        os.close(fd)


def _size(path: str, fd: int) -> int:
    status = os.fstat(fd)
    nbytes = devdax_bytes(status) if stat.S_ISCHR(status.st_mode) else status.st_size
    if not nbytes or nbytes < HEADER_BYTES:
        raise UserError(f"{path}: no device of a pool", remedy="`emu status` lists the devices")
    return nbytes


def _header(path: str, mapped: MappedMemory) -> Header:
    _native.invalidate(mapped.memory, 0, HEADER_BYTES)
    header = read_header(mapped.memory[:HEADER_BYTES].tobytes(), path)
    if header is None:
        raise UserError(f"{path}: no pool is on it yet", remedy="open a store on it first")
    check_sizes(header, path, mapped.memory.size)
    return header


def _offline(mapped: MappedMemory, header: Header) -> _native.SharedPool:
    return native_pool(mapped, header, 1.0, offline=True)


def _inspection(path: str, header: Header, pool: _native.SharedPool) -> Inspection:
    members = [
        Member(slot, epoch, _SEATS[seat], pid, gone, leases, lines)
        for slot, (epoch, seat, pid, gone, leases, lines) in enumerate(pool.members())
    ]
    requests = [
        Request(
            generation,
            key,
            STATES[stage],
            prompt,
            tokens,
            shared,
            tuple(blocks),
            leases,
            appending,
            used,
            named,
        )
        for generation, key, stage, prompt, tokens, shared, blocks, leases, appending, used, named in pool.requests_read()
    ]
    dead = [
        f"process {one.pid} of slot {one.slot} is gone; the next writer ends its {one.leases} leases"
        for one in members
        if one.seat == "taken" and one.gone
    ]
    return Inspection(
        str(Path(path)),
        header,
        pool.transactions,
        tuple(one for one in members if one.epoch or one.pid),
        tuple(requests),
        tuple(pool.problems),
        (*pool.notes, *dead),
    )
