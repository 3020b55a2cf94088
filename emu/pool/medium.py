"""What a backend must do: move rows between one device's memory and the caller's buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


class Medium(ABC):
    """One device's memory. Native faults (_native.SlotFault, _native.TokenFault) pass through to the pool.

    Attributes:
        name: for messages.
        size_bytes: the device's size, header included.
        directory_path: where the pool's directory of this device lies; "" where the metadata is in mapped().
    """

    name: str
    size_bytes: int
    directory_path: str

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
    def gather(
        self,
        tables: _native.RowTables,
        region: Region,
        slots: SlotIds,
        tokens: TokenIds,
        out: Rows,
        out_rows: TokenIds | None,
        packed: bool,
    ) -> int:
        """KVStore.gather of one region; arguments are checked already. out is uint8 [R, row_bytes].

        Without out_rows the row of tokens[b, j] lands in out[b * k + j]. Returns rows fetched.
        """

    @abstractmethod
    def scatter(
        self, tables: _native.RowTables, region: Region, slots: SlotIds, start: TokenIds, rows: Rows
    ) -> None:
        """KVStore.append of one region: rows uint8 [B, n, row_bytes]; advances the region's lengths in tables.

        Refuses tokens below a request's shared_tokens (_native.TokenFault) before anything is written.
        """

    def check(self) -> None:  # noqa: B027  (a medium without a path has nothing to check)
        """Refuse a device that was replaced since it was opened; called before requests are reserved or attached.

        Raises:
            MediumError: says what stands there now.
        """

    @abstractmethod
    def add_stats(self, stats: Stats) -> None:
        """Fill in what only the medium knows (work requests, flushed lines, NUMA facts)."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Set the medium's counters to zero."""
