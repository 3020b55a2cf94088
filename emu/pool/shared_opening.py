"""Opening a device whose metadata lies in its own memory: what its first page says, and what to do about it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

from emu import _native
from emu.errors import LayoutMismatch, MediumError, UserError
from emu.layout import HEADER_BYTES, LINE_BYTES, POOL_SLOTS
from emu.pool.header import ForeignHeader, Header, parse_page
from emu.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from emu.layout import KVLayout
    from emu.pool.medium import MappedMemory, Medium

LOCK_TIMEOUT_S = 60.0
_CHUNK_BYTES = 1 << 20


class Action(Enum):
    """What opening has to do."""

    USE = auto()  # a pool of ours that fits us
    FORMAT = auto()  # nothing is there yet
    REPLACE = auto()  # a pool of another layout: it goes unless somebody holds something in it


def plan_opening(page: bytes, layout: KVLayout, device: str, size_bytes: int) -> Action:
    """Decide, without touching anything.

    Args:
        page: the device's first page.
        layout: the caller's.
        device: for messages.
        size_bytes: of the device.

    Raises:
        UserError: the device is too small.
        MediumError: a foreign, older or damaged page, or one that says more than the device holds.
    """
    if layout.num_blocks(size_bytes) == 0:
        raise UserError(
            f"{device}: {size_bytes} bytes do not hold one block of {layout.block_bytes} bytes",
            remedy=f"make it at least {format_size(layout.device_bytes(1))}",
        )
    header = read_header(page, device)
    if header is None:
        return Action.FORMAT
    check_sizes(header, device, size_bytes)
    return Action.USE if header.layout == layout.fingerprint() else Action.REPLACE


def read_header(page: bytes, device: str) -> Header | None:
    """The page's header; None for a page of zeros.

    Raises:
        MediumError: it is foreign, of another version, or damaged.
    """
    try:
        header = parse_page(page)
    except ForeignHeader as error:
        raise MediumError(
            f"{device}: {error}",
            device=device,
            status="FOREIGN_HEADER",
            remedy="take another device, or give up what is on it: `emu pool format`",
        ) from error
    if header is not None and header.meta_offset == 0:
        raise MediumError(
            f"{device}: a pool whose metadata is kept by a memory node, not on the device",
            device=device,
            status="FOREIGN_HEADER",
            remedy="open it through its memory node",
        )
    return header


def check_sizes(header: Header, device: str, size_bytes: int) -> None:
    """Refuse a header that cannot be, and a device that is shorter than its pool.

    Raises:
        MediumError: says which.
    """
    remedy = "give up what is on it: `emu pool format`, or make the device anew"
    sizes = header.metadata
    wrong = [
        f"{sizes.slots} slots, at most {POOL_SLOTS} can be"
        * (sizes.slots not in range(2, POOL_SLOTS + 1)),
        f"{header.num_blocks} blocks before its metadata at byte {header.meta_offset}"
        * (header.num_blocks * LINE_BYTES > header.meta_offset),
        f"logs of {sizes.ring_lines} lines and snapshots of {sizes.snapshot_lines}"
        * (sizes.ring_lines < 28 or sizes.snapshot_lines < 16),
        f"metadata at byte {header.meta_offset}" * (header.meta_offset % HEADER_BYTES != 0),
    ]
    if any(wrong):
        raise MediumError(
            f"{device}: a pool header that cannot be: {next(filter(None, wrong))}",
            device=device,
            status="METADATA_DAMAGED",
            remedy=remedy,
        )
    if header.end > size_bytes:
        raise MediumError(
            f"{device}: its pool takes {header.end} bytes, the device has {size_bytes}: it was cut",
            device=device,
            status="DEVICE_TRUNCATED",
            remedy=remedy,
        )


def open_shared(medium: Medium, mapped: MappedMemory, layout: KVLayout) -> Header:
    """Agree on the pool of a device with everyone who opens it; the caller holds machine_lock().

    Raises:
        UserError, MediumError: as plan_opening().
        LayoutMismatch: somebody holds requests of another layout.
    """
    page = medium.read(0, HEADER_BYTES)
    action = plan_opening(page, layout, medium.name, medium.size_bytes)
    header = parse_page(page)
    if action is Action.REPLACE:
        assert header is not None
        pids = lease_holders(mapped, header)
        if pids:
            raise LayoutMismatch(
                device=medium.name,
                found=header.layout.hex(),
                expected=layout.fingerprint().hex(),
                rows=layout.describe(),
                remedy=f"held by {holders(pids)}: close its stores or end it, or use another device",
            )
    if action is not Action.USE or header is None:
        header = Header.fresh(layout, medium.size_bytes)
        write_pool(medium, header)
    return header


def holders(pids: Sequence[int]) -> str:
    """ "process 7, 9", or that it is the caller."""
    others = ", ".join(str(pid) for pid in pids if pid != os.getpid())
    own = f"this process ({os.getpid()})" if os.getpid() in pids else ""
    return " and ".join(filter(None, (own, others and f"process {others}")))


def write_pool(medium: Medium, header: Header) -> None:
    """Format a device: until the last step its first page is zero, so that a kill leaves nothing half made."""
    medium.write(0, bytes(HEADER_BYTES))
    for offset in range(header.meta_offset, header.end, _CHUNK_BYTES):
        medium.write(offset, bytes(min(_CHUNK_BYTES, header.end - offset)))
    medium.write(0, header.to_page())


def native_pool(
    mapped: MappedMemory, header: Header, expiry_s: float, *, offline: bool = False
) -> _native.SharedPool:
    """The metadata of a device, for reading until it joins; offline: what can be read of it, never to join.

    Raises:
        _native.PoolFault: it is damaged.
    """
    return _native.SharedPool(
        memory=mapped.memory,
        fd=mapped.checked_fd,
        coherent=mapped.coherent,
        num_blocks=header.num_blocks,
        block_tokens=header.block_tokens,
        meta_offset=header.meta_offset,
        slots=header.metadata.slots,
        ring_lines=header.metadata.ring_lines,
        snapshot_lines=header.metadata.snapshot_lines,
        expiry_s=expiry_s,
        quarantine_s=10 * expiry_s,
        offline=offline,
    )


def lease_holders(mapped: MappedMemory, header: Header) -> list[int]:
    """Pids of the stores that hold leases and are not proven dead; none in metadata that cannot be read."""
    try:
        members = native_pool(mapped, header, 1.0).members()
    except _native.PoolFault:
        return []
    return sorted(
        {pid for _, seat, pid, gone, leases, _ in members if leases and seat and not gone}
    )


@contextmanager
def machine_lock(mapped: MappedMemory, device: str) -> Iterator[None]:
    """Nobody else on this machine opens the device meanwhile.

    Raises:
        MediumError: somebody keeps it for LOCK_TIMEOUT_S.
    """
    if mapped.fd < 0:
        yield
        return
    fd = os.open(f"/proc/self/fd/{mapped.fd}", os.O_RDWR | os.O_CLOEXEC)  # a lock of its own
    try:
        _take_lock(fd, device)
        yield
    finally:
        os.close(fd)


def _take_lock(fd: int, device: str) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise MediumError(
                    f"{device}: another process has been opening it for {LOCK_TIMEOUT_S:.0f} s",
                    device=device,
                    status="LOCKED",
                    remedy="look for a stopped process that has the device open",
                ) from None
            time.sleep(0.005)
        else:
            return
