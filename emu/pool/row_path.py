"""The hot path of a store: checked arguments in, rows moved by the medium, native faults as ours, time charged."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import ArgumentTypeError, SlotStale, TokenMissing, UserError
from emu.pool.medium import Gather, Region
from emu.store import Stats, Timing, check_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from emu.layout import KVLayout
    from emu.pool.held import Held, HeldRequests
    from emu.pool.medium import Medium
    from emu.store import Rows, SlotIds, TokenIds

_UNCHARGED = nullcontext()
_UNNAMED = "a component is named by a string, a layer by a whole number"


class RowPath:
    """Moves rows between one medium and the caller's buffers.

    Args:
        medium: where the rows lie.
        layout: how they lie.
        num_blocks: blocks of every region.
        held: the store's slots.
        timing: charges each call; None charges nothing.
        open_for_append: called with a slot whose tokens are closed to writes; opens it or raises.
        validate: called around every batch; raises when the leases may be gone.
    """

    def __init__(
        self,
        medium: Medium,
        layout: KVLayout,
        num_blocks: int,
        held: HeldRequests,
        timing: Timing | None,
        open_for_append: Callable[[int], None],
        validate: Callable[[], None],
    ) -> None:
        self.counters = Stats()
        self._medium = medium
        self._layout = layout
        self._held = held
        self._timing = timing
        self._open_for_append = open_for_append
        self._validate = validate
        self._regions = [
            Region(number, layout.region_offset(number, num_blocks), row_bytes)
            for number, row_bytes in enumerate(layout.region_row_bytes)
        ]

    def gather(
        self,
        slots: SlotIds,
        layer: int,
        tokens: TokenIds,
        out: Rows,
        component: str,
        out_rows: TokenIds | None,
        packed: bool,
    ) -> int:
        """KVStore.gather."""
        region = self._region(component, layer)
        check_array("slots", slots, np.int64, (None,))
        check_array("tokens", tokens, np.int32, (slots.shape[0], None))
        if out_rows is None:
            check_array("out", out, np.uint8, (*tokens.shape, region.row_bytes))
            out = out.reshape(tokens.size, region.row_bytes)
        else:
            check_array("out_rows", out_rows, np.int32, tokens.shape)
            check_array("out", out, np.uint8, (None, region.row_bytes))
        _check_writable(out)
        rows = int(np.count_nonzero(tokens >= 0)) if self._timing is not None else 0
        with self._charged("read", rows, rows * region.row_bytes):
            fetched = self._gather(region, Gather(slots, tokens, out, out_rows, packed))
            self._validate()
            return fetched

    def fetch(self, slot: int, component: str, start: int, out: Rows) -> None:
        """KVStore.fetch."""
        layers, row_bytes = self._component(component)
        check_array("out", out, np.uint8, (len(layers), None, row_bytes))
        _check_writable(out)
        count = out.shape[1]
        first = self._region(component, layers[0])
        if start < 0 or start + count > np.iinfo(np.int32).max:
            raise self._token_missing(slot, start, first)
        slots = np.array([slot], np.int64)
        tokens = np.arange(start, start + count, dtype=np.int32)[None]
        rows = len(layers) * count
        with self._charged("read", rows, rows * row_bytes):
            for index in range(len(layers)):
                region = self._regions[first.number + index]
                self._gather(region, Gather(slots, tokens, out[index]))
            self._validate()

    def append(
        self, slots: SlotIds, layer: int, start: TokenIds, rows: Rows, component: str
    ) -> None:
        """KVStore.append."""
        region = self._region(component, layer)
        check_array("slots", slots, np.int64, (None,))
        check_array("start", start, np.int32, slots.shape)
        check_array("rows", rows, np.uint8, (slots.shape[0], None, region.row_bytes))
        count = slots.shape[0] * rows.shape[1]
        with self._charged("write", count, rows.nbytes):
            self._validate()
            while not self._scatter(region, slots, start, rows):
                pass  # each round opened one more slot of the batch for writing
            self._validate()
        self.counters.rows_written += count
        self.counters.bytes_written += rows.nbytes

    def _gather(self, region: Region, wanted: Gather) -> int:
        try:
            rows = self._medium.gather(self._held.tables, region, wanted)
        except _native.SlotFault as fault:
            raise SlotStale(fault.args[0], device=self._medium.name) from None
        except _native.TokenFault as fault:
            raise self._token_missing(fault.args[0], fault.args[1], region) from None
        except IndexError as error:
            raise UserError(f"{self._medium.name}: {error}", remedy="check out_rows") from None
        self.counters.rows_read += rows
        self.counters.bytes_read += rows * region.row_bytes
        return rows

    def _scatter(self, region: Region, slots: SlotIds, start: TokenIds, rows: Rows) -> bool:
        """True when written; False when a slot had to be opened for writing first."""
        try:
            self._medium.scatter(self._held.tables, region, slots, start, rows)
        except _native.SlotFault as fault:
            raise SlotStale(fault.args[0], device=self._medium.name) from None
        except _native.TokenFault as fault:
            held = self._held.get(fault.args[0])
            refusal = self._refusal(region, held, start[slots == held.slot], rows.shape[1])
            if refusal is not None:
                raise refusal from None
            self._open_for_append(held.slot)
            return False
        return True

    def _refusal(
        self, region: Region, held: Held, starts: TokenIds, count: int
    ) -> UserError | None:
        """Why rows cannot be written there, by what this side knows; None when they can once the slot is open."""
        length = self._held.tables.length(held.slot, region.number)
        capacity = self._held.tables.capacity(held.slot)
        for start in starts.tolist():
            if start < held.entry.num_tokens:
                reason = f"tokens before {held.entry.num_tokens} are shared or published"
            elif start > length:
                reason = f"it holds {length}, so that would leave a gap"
            elif start + count > capacity:
                reason = f"{capacity} are reserved"
            else:
                continue
            component, layer = self._layout.regions[region.number]
            return UserError(
                f"{self._medium.name}: request {held.entry.key!r}, {component} of layer {layer}:"
                f" cannot write {count} tokens from {start}: {reason}",
                remedy="append where the layer ends, into what reserve(append_tokens=...) set aside",
            )
        return None

    def _token_missing(self, slot: int, token: int, region: Region) -> TokenMissing:
        component, layer = self._layout.regions[region.number]
        return TokenMissing(
            device=self._medium.name,
            key=self._held.get(slot).entry.key,
            component=component,
            layer=layer,
            token=token,
            length=self._held.tables.length(slot, region.number),
        )

    def _region(self, component: str, layer: int) -> Region:
        try:
            return self._regions[self._layout.region(component, layer)]
        except KeyError as error:
            raise UserError(error.args[0], remedy="see the store's layout") from None
        except TypeError:
            raise ArgumentTypeError(_UNNAMED, remedy="see the store's layout") from None

    def _component(self, name: str) -> tuple[tuple[int, ...], int]:
        try:
            component = self._layout.component(name)
        except KeyError as error:
            raise UserError(error.args[0], remedy="see the store's layout") from None
        except TypeError:
            raise ArgumentTypeError(_UNNAMED, remedy="see the store's layout") from None
        return component.layers, component.row_bytes

    def _charged(self, operation: str, rows: int, nbytes: int) -> AbstractContextManager[None]:
        if self._timing is None:
            return _UNCHARGED
        return self._charge(self._timing, operation, rows, nbytes)

    @contextmanager
    def _charge(self, timing: Timing, operation: str, rows: int, nbytes: int) -> Iterator[None]:
        handle = timing.begin(operation, nbytes, rows)
        try:
            yield
        finally:
            charged_ns, waited_ns = timing.end(handle)
            self.counters.charged_ns += charged_ns
            self.counters.waited_ns += waited_ns


def _check_writable(out: Rows) -> None:
    if not out.flags.writeable:
        raise UserError("out: got a read-only array, wanted a writable one", remedy="copy it")
