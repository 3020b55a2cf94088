"""What a backend must do: move rows between one device's memory and the caller's buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.errors import MediumError

if TYPE_CHECKING:
    from emu import _native
    from emu.store import Rows, SlotIds, Stats, TokenIds


@dataclass(frozen=True, slots=True)
class Region:
    """One (component, layer) of a device.

    Attributes:
        number: region number of the layout.
        offset: bytes from the start of the device to block 0.
        row_bytes: bytes of a row.
    """

    number: int
    offset: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """A device's memory as this process maps it.

    Attributes:
        memory: uint8 [size of the device].
        fd: the device's open file, -1 for memory that no other process sees.
        checked_fd: the same where its size can shrink, else -1.
        coherent: whether hardware keeps hosts coherent.
    """

    memory: Rows
    fd: int
    checked_fd: int
    coherent: bool


@dataclass(slots=True)
class Gather:
    """The arguments of one KVStore.gather, checked.

    Attributes:
        slots: int64 [B].
        tokens: int32 [B, k]; -1 pads.
        out: uint8 [R, row_bytes].
        out_rows: int32 [B, k], the row of out for each token; None: tokens[b, j] lands in out[b * k + j].
        packed: the owner packs the rows into one message.
    """

    slots: SlotIds
    tokens: TokenIds
    out: Rows
    out_rows: TokenIds | None = None
    packed: bool = False


class Medium(ABC):
    """One device's memory. Native faults (_native.SlotFault, _native.TokenFault) pass through to the pool.

    Attributes:
        name: for messages.
        size_bytes: the device's size, header included.
        directory_path: where the pool's directory of this device lies; "" where the metadata is in mapped().
        header: what the device begins with while the pool on it is the one that was opened; b"" before that.
    """

    name: str
    size_bytes: int
    directory_path: str
    header: bytes = b""

    @abstractmethod
    def close(self) -> None:
        """Release everything; closing twice is allowed."""

    def mapped(self) -> MappedMemory | None:
        """The device's memory, for the metadata in it; None where this process cannot load and store there."""
        return None

    @abstractmethod
    def buffer(self, nbytes: int) -> Rows:
        """uint8 [nbytes], line-aligned, usable by gather and scatter without a copy."""

    @abstractmethod
    def read(self, offset: int, nbytes: int) -> bytes:
        """Raw bytes (control path: the header)."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Raw bytes, visible to other hosts on return (control path: the header)."""

    @abstractmethod
    def gather(self, tables: _native.RowTables, region: Region, wanted: Gather) -> int:
        """KVStore.gather of one region; returns rows fetched."""

    @abstractmethod
    def scatter(
        self, tables: _native.RowTables, region: Region, slots: SlotIds, start: TokenIds, rows: Rows
    ) -> None:
        """KVStore.append of one region: rows uint8 [B, n, row_bytes]; advances the region's lengths in tables.

        Refuses tokens below a request's shared_tokens (_native.TokenFault) before anything is written.
        """

    def check(self) -> None:
        """Refuse a device that was replaced, cut or formatted since it was opened.

        Called before requests are reserved, published or attached.

        Raises:
            MediumError: says what stands there now.
        """
        if self.header and self.read(0, len(self.header)) != self.header:
            raise self.header_gone()

    def header_gone(self) -> MediumError:
        """The error for a device that does not begin with the header any more."""
        return MediumError(
            f"{self.name}: the pool that was opened is not on the device any more: it was formatted anew, or cut",
            device=self.name,
            status="POOL_REPLACED",
            remedy="open the store again",
        )

    @abstractmethod
    def add_stats(self, stats: Stats) -> None:
        """Fill in what only the medium knows (work requests, flushed lines, NUMA facts)."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set the medium's counters to zero."""
