"""Charges the operations of one store to a medium's model: for those who open a store by themselves.

    store = emu.open_store(url, layout, StoreOptions(timing=store_timing("cxl-switch", "paced", dilation=30)))

A store is one device, so the medium is one link; `shared` names a file by which the stores of several processes
queue on the same link.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError
from emu.process import boot_id
from emu.suggest import unknown
from emu.timing.pace import check_dilation
from emu.timing.profile_file import load_media

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from emu.timing.profile import LinkModel, MediaProfile

_LINE_BYTES = 64
_MAGIC = b"emulink1"
_HEADER = struct.Struct("<8s16s16sd")  # magic, boot id, profile, dilation
_OPERATIONS = ("read", "write")


def store_timing(
    profile: str = "cxl-switch",
    mode: str = "virtual",
    *,
    dilation: float = 1.0,
    shared: str | Path | None = None,
    software_coherence: bool = False,
) -> StoreTiming:
    """A timing for StoreOptions(timing=...).

    Args:
        profile: a media profile's name or .toml file.
        mode: "virtual" counts model time; "paced" also waits until the host has spent it, times the dilation.
        dilation: host time per model time, paced only.
        shared: a file that the processes which share the device give, paced only; made if it is not there.
        software_coherence: charge the write-back or invalidation of every line.

    Raises:
        UserError: no such profile or mode, or a shared file of something else.
    """
    medium = load_media(profile)
    if mode == "virtual":
        if shared is not None:
            raise UserError(
                "shared= needs mode 'paced'", remedy="processes have no virtual time in common"
            )
        return VirtualStoreTiming(medium, software_coherence=software_coherence)
    if mode != "paced":
        raise unknown("store timing mode", mode, ("virtual", "paced"))
    check_dilation(dilation)
    words = np.zeros(_LINE_BYTES, np.uint8) if shared is None else _map(shared, medium, dilation)
    return PacedStoreTiming(medium, dilation, words, software_coherence=software_coherence)


class StoreTiming(ABC):
    """Charges operations to one link (emu.store.Timing); one per store, not for several threads."""

    def __init__(
        self,
        medium: MediaProfile,
        engine: _native.TimeEngine | _native.LinkClock,
        *,
        software_coherence: bool,
    ) -> None:
        engine.add_link(*medium.model.native())
        self._paths = {
            operation: _add_path(engine, medium.model, write=operation == "write")
            for operation in _OPERATIONS
        }
        self._flush_ns = medium.model.flush_ns.value if software_coherence else 0.0
        self._in_flight: dict[int, tuple[int, int]] = {}
        self._handles = 0

    def begin(self, operation: str, nbytes: int, rows: int) -> int:
        """Reserve the link for "read" or "write" of that much; returns a handle for end()."""
        if operation not in self._paths:
            raise unknown("store operation", operation, _OPERATIONS)
        flush_ns = round(self._flush_ns * -(-nbytes // _LINE_BYTES))
        start_ns = self._now_ns()
        end_ns = self._reserve(self._paths[operation], start_ns, nbytes, rows) + flush_ns
        self._handles += 1
        self._in_flight[self._handles] = (start_ns, end_ns)
        return self._handles

    def end(self, handle: int) -> tuple[int, int]:
        """Finish: (model ns charged, host ns waited)."""
        start_ns, end_ns = self._in_flight.pop(handle)
        return end_ns - start_ns, self._finish(end_ns)

    @abstractmethod
    def _now_ns(self) -> int: ...

    @abstractmethod
    def _reserve(self, path: int, start_ns: int, nbytes: int, rows: int) -> int: ...

    @abstractmethod
    def _finish(self, end_ns: int) -> int: ...


class VirtualStoreTiming(StoreTiming):
    """Counts model time; the store's operations follow one another."""

    def __init__(self, medium: MediaProfile, *, software_coherence: bool) -> None:
        self._engine = _native.TimeEngine()
        self._time_ns = 0
        super().__init__(medium, self._engine, software_coherence=software_coherence)

    def _now_ns(self) -> int:
        return self._time_ns

    def _reserve(self, path: int, start_ns: int, nbytes: int, rows: int) -> int:
        return self._engine.transfer(path, start_ns, nbytes, rows)

    def _finish(self, end_ns: int) -> int:
        self._time_ns = max(self._time_ns, end_ns)
        return 0


class PacedStoreTiming(StoreTiming):
    """Waits until the host has spent the model time; the real copy is part of it."""

    def __init__(
        self,
        medium: MediaProfile,
        dilation: float,
        words: NDArray[np.uint8],
        *,
        software_coherence: bool,
    ) -> None:
        self._clock = _native.LinkClock(words, dilation)
        super().__init__(medium, self._clock, software_coherence=software_coherence)

    def _now_ns(self) -> int:
        return self._clock.now_ns()

    def _reserve(self, path: int, start_ns: int, nbytes: int, rows: int) -> int:
        return self._clock.reserve(path, start_ns, nbytes, rows)

    def _finish(self, end_ns: int) -> int:
        return self._clock.wait_until_ns(end_ns)


def _add_path(
    engine: _native.TimeEngine | _native.LinkClock, model: LinkModel, *, write: bool
) -> int:
    return engine.add_path(
        np.zeros(1, np.int32),
        np.zeros(1, np.bool_),
        write,
        model.setup_ns.value,
        int(model.parallelism.value),
    )


def _map(file: str | Path, medium: MediaProfile, dilation: float) -> NDArray[np.uint8]:
    """Map the link's word, uint8 [64]; one left by an earlier boot counts ticks of another origin: begin anew."""
    size = 2 * _LINE_BYTES
    this_boot = uuid.UUID(boot_id()).bytes
    profile = hashlib.sha256(medium.name.encode()).digest()[:16]
    header = _HEADER.pack(_MAGIC, this_boot, profile, dilation)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            f"shared link file {file} cannot be opened: {error.strerror}",
            remedy="give a path in a writable directory",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = os.pread(descriptor, _HEADER.size, 0)
        if found and found[: len(_MAGIC)] != _MAGIC:
            raise UserError(f"{file} is no shared link file", remedy="give the path of a new file")
        if found[8:24] != this_boot:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, header, 0)
        elif found != header:
            raise UserError(
                f"{file} is in use with another profile or dilation",
                remedy="give the same ones in every process, or the path of a new file",
            )
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # by hand: the mapping keeps a duplicate open
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8)[_LINE_BYTES:]
