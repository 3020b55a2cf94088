"""The requests that one store holds: leases, their slots, and from which token on each may be written."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import ArgumentTypeError, SlotStale

if TYPE_CHECKING:
    from emu.layout import KVLayout
    from emu.pool.records import Entry, Lease

_CLOSED = (1 << 31) - 1  # above every token index


def whole_number(name: str, value: object) -> int:
    """A Python or numpy integer as an int.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(
            f"{name}: got a {type(value).__name__}", remedy="give a whole number"
        ) from None


@dataclass(slots=True)
class Held:
    """One slot.

    Attributes:
        slot: the handle.
        lease: the lease's number in the directory.
        entry: what the directory said when it was taken, or last published from here.
        may_append: whether this lease has the right to append.
    """

    slot: int
    lease: int
    entry: Entry
    may_append: bool


class HeldRequests:
    """Slots by handle and by generation, over the native block tables."""

    def __init__(self, layout: KVLayout, device: str) -> None:
        self.tables = _native.RowTables(layout.block_tokens, len(layout.regions))
        self._device = device
        self._by_slot: dict[int, Held] = {}

    def add(self, lease: Lease, *, may_append: bool) -> Held:
        """A slot for a lease; only one that may append can be written, from the directory's tokens on."""
        entry = lease.entry
        written = min(entry.num_tokens, entry.prompt_tokens)
        blocks = np.array(entry.blocks, np.int32)
        slot = self.tables.add(
            blocks, entry.prompt_tokens, written, entry.num_tokens, entry.append_tokens
        )
        held = Held(slot, lease.number, entry, may_append)
        self._by_slot[slot] = held
        self.set_append(held, may_append=may_append)
        return held

    def set_append(self, held: Held, *, may_append: bool) -> None:
        """Open a slot for tokens from its entry's num_tokens on, or close it."""
        held.may_append = may_append
        self.tables.set_shared(held.slot, held.entry.num_tokens if may_append else _CLOSED)

    def get(self, slot: int) -> Held:
        """The request of a slot.

        Raises:
            SlotStale: there is none.
        """
        held = self._by_slot.get(whole_number("slot", slot))
        if held is None:
            raise SlotStale(slot, device=self._device)
        return held

    def of(self, generation: int) -> list[Held]:
        """Every slot of a request, the one that may append first."""
        found = [held for held in self._by_slot.values() if held.entry.generation == generation]
        return sorted(found, key=lambda held: not held.may_append)

    def remove(self, slot: int) -> None:
        """Forget a slot; using it later is a SlotStale."""
        del self._by_slot[slot]
        self.tables.remove(slot)
