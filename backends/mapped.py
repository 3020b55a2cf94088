"""Memory that this process maps: what DRAM and CXL devices have in common."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native, numa
from emu.devdax import devdax_bytes, identity
from emu.errors import HostError, MediumError, UserError
from emu.host_memory import occupies_memory, require_free
from emu.layout import LINE_BYTES
from emu.pool.medium import Gather, MappedMemory, Medium, Region
from emu.units import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from emu.store import Rows, SlotIds, Stats, StoreOptions, TokenIds


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapped device.

    Attributes:
        name: for messages.
        memory: the mapping.
        fd: the device's open file, -1 for anonymous memory; MappedMedium closes it.
        path: where it was opened, None for anonymous memory.
    """

    name: str
    memory: mmap.mmap
    fd: int
    path: Path | None


def map_anonymous(nbytes: int) -> Mapping:
    """Private memory of this process.

    Raises:
        HostError: there is no room for it.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise HostError(
            f"{format_size(nbytes)} of memory cannot be had: {error}",
            capability="memory",
            remedy="ask for less capacity_bytes",
        ) from error
    return Mapping("dram", memory, -1, None)


def map_device(path: Path) -> Mapping:
    """Map an existing device whole: a regular file, or a devdax device.

    Raises:
        UserError: no such device, or not one that can be mapped.
        HostError: no permission, or no room behind a sparse file.
    """
    fd = open_device(path)
    try:
        nbytes = _device_bytes(path, fd)
        memory = mmap.mmap(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise HostError(
            f"{path}: cannot be mapped: {error.strerror}",
            capability="shared_memory",
            remedy="use a regular file on tmpfs or a devdax device",
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return Mapping(str(path), memory, fd, path)


def open_device(path: Path, flags: int = 0) -> int:
    """Open a device for reading and writing.

    Raises:
        UserError: there is none.
        HostError: no permission.
        FileExistsError: with os.O_EXCL, for one that is there.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise UserError(
            f"{path}: no such device: {error.strerror}",
            remedy="`emu up` makes devices, `emu status` lists them",
        ) from error
    except FileExistsError:
        raise
    except OSError as error:
        raise HostError(
            f"{path}: cannot be opened for reading and writing: {error.strerror}",
            capability="shared_memory",
            remedy="check the device's permissions",
        ) from error


def _device_bytes(path: Path, fd: int) -> int:
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode):
        return _devdax_bytes(path, status)
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0 or status.st_size % mmap.PAGESIZE:
        kind = "a file" if stat.S_ISREG(status.st_mode) else "not a file"
        raise UserError(
            f"{path}: {kind} of {status.st_size} bytes is no device",
            remedy=f"use a devdax device, or a file of a multiple of {mmap.PAGESIZE} bytes",
        )
    if status.st_blocks * 512 < status.st_size:
        allocate(path, fd, status.st_size)  # a hole that cannot be filled later would be a SIGBUS
    return status.st_size


def _devdax_bytes(path: Path, status: os.stat_result) -> int:
    try:
        size_bytes = devdax_bytes(status)
    except (OSError, ValueError) as error:
        raise HostError(
            f"{path}: its size cannot be read: {error}", remedy="use /dev/daxN.M"
        ) from error
    if size_bytes is None:
        raise UserError(f"{path}: a character device that is not devdax", remedy="use /dev/daxN.M")
    return size_bytes


def allocate(path: Path, fd: int, nbytes: int) -> None:
    """Give a file its memory, whatever it holds stays.

    Raises:
        HostError: it does not fit, with the numbers; the file is as it was.
    """
    allocated = os.fstat(fd).st_blocks * 512
    file_system = os.fstatvfs(fd)
    free = file_system.f_bavail * file_system.f_frsize
    message = f"{path}: {nbytes} bytes do not fit, its file system has {free} free"
    remedy = "make it smaller, or use another folder"
    if nbytes - allocated > free:
        raise HostError(message, capability="shared_memory", remedy=remedy)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise HostError(
            f"{message} ({error.strerror})", capability="shared_memory", remedy=remedy
        ) from error


class MappedMedium(Medium):
    """Rows by load and store.

    Args:
        mapping: closed with the medium.
        options: coherent and numa_node are used here.
    """

    def __init__(self, mapping: Mapping, options: StoreOptions) -> None:
        self.name = mapping.name
        self.size_bytes = len(mapping.memory)
        self.directory_path = ""
        self._mapping = mapping
        self._memory: Rows = np.frombuffer(mapping.memory, np.uint8)
        self._coherent = options.coherent
        self._lines_flushed = 0
        self._opened = None if mapping.fd < 0 else os.fstat(mapping.fd)
        self._sized = self._opened is not None and stat.S_ISREG(self._opened.st_mode)
        self._whole_blocks = self._blocks_when_whole()
        self._numa = None
        if options.numa_node is not None:
            try:
                self._numa = numa.bind(self._memory, options.numa_node, fresh=mapping.path is None)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """See Medium.close; a mapping that the caller still looks into goes with its last view."""
        if self._mapping.memory.closed or not self._memory.size:
            return
        self._memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._mapping.memory.close()
        if self._mapping.fd >= 0:
            os.close(self._mapping.fd)

    def mapped(self) -> MappedMemory:
        """See Medium.mapped."""
        fd = self._mapping.fd
        return MappedMemory(self._memory, fd, fd if self._sized else -1, self._coherent)

    def buffer(self, nbytes: int) -> Rows:
        """See Medium.buffer."""
        require_free(nbytes, "a buffer")
        room = np.zeros(nbytes + LINE_BYTES, np.uint8)
        start = -room.ctypes.data % LINE_BYTES
        return room[start : start + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """See Medium.read."""
        self._check_size()
        if not self._coherent:
            self._lines_flushed += _native.invalidate(self._memory, offset, nbytes)
        return self._memory[offset : offset + nbytes].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """See Medium.write."""
        self._check_size()
        self._memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if not self._coherent:
            self._lines_flushed += _native.writeback(self._memory, offset, len(data))

    def gather(self, tables: _native.RowTables, region: Region, wanted: Gather) -> int:
        """See Medium.gather; without hardware coherence the rows' lines are dropped first."""
        self._check_pool()
        where = (tables, self._memory, region.number, region.offset, region.row_bytes)
        if not self._coherent:
            self._lines_flushed += _native.invalidate_tokens(*where, wanted.slots, wanted.tokens)
        return _native.gather_rows(*where, wanted.slots, wanted.tokens, wanted.out, wanted.out_rows)

    def scatter(
        self, tables: _native.RowTables, region: Region, slots: SlotIds, start: TokenIds, rows: Rows
    ) -> None:
        """See Medium.scatter; without hardware coherence the written lines are written back.

        A row that is no multiple of a line shares its first line with the row before it. Whoever had the right
        to append before may have written that one, so an old copy of the line must not be written back over it.
        """
        self._check_pool()
        where = (tables, self._memory, region.number, region.offset, region.row_bytes)
        if not self._coherent and region.row_bytes % LINE_BYTES:
            before = (start - 1)[:, None]  # -1 pads: there is no row before the first
            self._lines_flushed += _native.invalidate_tokens(*where, slots, before)
        _native.scatter_rows(*where, slots, start, rows, False)
        if not self._coherent:
            self._lines_flushed += _native.writeback_rows(*where, slots, start, rows.shape[1])

    def check(self) -> None:
        """See Medium.check."""
        self._check_size()
        if self._opened is None or self._mapping.path is None:
            return super().check()
        try:
            now = self._mapping.path.stat()
        except FileNotFoundError:
            found = "nothing"
        else:
            if identity(now) == identity(self._opened):
                return super().check()
            found = "another file"
        raise MediumError(
            f"{self.name}: the device was removed or replaced underneath: {found} stands there",
            device=self.name,
            status="DEVICE_REPLACED",
            remedy="open the store again",
        )

    def _check_pool(self) -> None:
        """On the hot path: one fstat() and one cache line."""
        self._check_size()
        if self._memory[: len(self.header)].tobytes() != self.header:
            raise self.header_gone()

    def _check_size(self) -> None:
        """Refuse a file that was cut: touching what is gone would kill the process (SIGBUS).

        Or would be read as zeros, where it has grown back since.
        """
        if not self._sized:
            return
        now = os.fstat(self._mapping.fd)
        if now.st_size < self.size_bytes:
            found = f"shrank from {self.size_bytes} to {now.st_size} bytes"
        elif now.st_blocks < self._whole_blocks:
            lost_bytes = (self._whole_blocks - now.st_blocks) * 512
            found = f"was cut and has grown back: {lost_bytes} bytes of it are gone"
        else:
            return
        raise MediumError(
            f"{self.name}: the device {found}",
            device=self.name,
            status="DEVICE_TRUNCATED",
            remedy="make the device anew: `emu down`, `emu up`",
        )

    def _blocks_when_whole(self) -> int:
        """st_blocks below which a part was given back; 0 where that says nothing, as on a disk that compresses."""
        if self._opened is None or self._mapping.path is None or not self._sized:
            return 0
        whole = self.size_bytes // 512
        in_memory = occupies_memory(self._mapping.path)
        return whole if in_memory and self._opened.st_blocks >= whole else 0

    def add_stats(self, stats: Stats) -> None:
        """See Medium.add_stats."""
        stats.lines_flushed = self._lines_flushed
        if self._numa is not None:
            stats.numa_node = self._numa.node
            stats.numa_bound = self._numa.bound
            stats.numa_reason = self._numa.reason

    def reset_stats(self) -> None:
        """See Medium.reset_stats."""
        self._lines_flushed = 0
