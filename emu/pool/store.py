"""The KV store over a directory, block tables and a medium; a backend only brings the medium."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from emu.errors import (
    ArgumentTypeError,
    KeyMissing,
    LayoutMismatch,
    StoreClosed,
    StoreError,
    UserError,
)
from emu.pool.directory import Directory
from emu.pool.held import HeldRequests, whole_number
from emu.pool.records import Wanted
from emu.pool.row_path import RowPath
from emu.pool.shared_directory import SharedDirectory
from emu.pool.space import HASH_BYTES
from emu.store import Capability, Descriptor, KVStore, Reservation, Stats, check_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.layout import KVLayout
    from emu.pool.held import Held
    from emu.pool.medium import Medium
    from emu.pool.records import Entry
    from emu.store import BoolMask, Rows, SlotIds, StoreOptions, TokenIds

_MAX_TOKENS = (1 << 31) - 1  # token indices are int32


class PoolStore(KVStore):
    """Everything but the bytes' way; backends subclass it with an open() that makes a Medium.

    A request that this store reserved, put or attached keeps its lease until delete, detach or close: it is
    never evicted under it. Only published requests that nobody holds are evicted, the least recently used first.

    Args:
        medium: closed with the store, and at once if the store cannot be opened.
        layout: of the rows.
        options: timing is the one used here; the medium has seen the others.
        capabilities: what the medium offers.
    """

    def __init__(
        self, medium: Medium, layout: KVLayout, options: StoreOptions, capabilities: Capability
    ) -> None:
        self.layout = layout
        self.capabilities = capabilities
        self.device = medium.name
        self._medium = medium
        self._pid = os.getpid()
        self._closed = False
        try:
            self._directory = _open_directory(medium, layout, options)
        except BaseException:
            medium.close()
            raise
        medium.header = self._directory.pool.to_bytes()
        self._held = HeldRequests(layout, medium.name)
        self._rows = RowPath(
            medium,
            layout,
            self._directory.pool.num_blocks,
            self._held,
            options.timing,
            self._open_for_append,
            self._directory.validate,
        )

    # -- life ---------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Release everything, attachments first. A forked child's close leaves its parent's leases alone."""
        if self._closed:
            return
        self._closed = True
        try:
            if os.getpid() == self._pid:
                self._directory.close()
            else:
                self._directory.abandon()
        finally:
            self._medium.close()

    def _usable(self) -> None:
        if self._closed:
            raise StoreClosed(device=self.device)
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.device}: the store was opened by process {self._pid}, this is its fork {os.getpid()}",
                remedy="open the store in the process that uses it",
            )

    def buffer(self, nbytes: int) -> Rows:
        """See KVStore.buffer."""
        self._usable()
        nbytes = whole_number("nbytes", nbytes)
        if nbytes < 0:
            raise UserError(f"a buffer of {nbytes} bytes", remedy="ask for 0 or more")
        return self._medium.buffer(nbytes)

    # -- control path -------------------------------------------------------------------------------------
    def reserve(
        self,
        key: str,
        num_tokens: int,
        *,
        block_hashes: Sequence[bytes] = (),
        append_tokens: int = 0,
    ) -> Reservation:
        """See KVStore.reserve."""
        self._usable()
        self._medium.check()
        _check_list("block_hashes", block_hashes)
        want = Wanted(key, num_tokens, tuple(block_hashes), append_tokens)
        self._check_wanted(want)
        (lease,) = self._directory.reserve([want])
        held = self._held.add(lease, may_append=True)
        return Reservation(held.slot, lease.entry.shared_tokens)

    def _check_wanted(self, want: Wanted) -> None:
        if not all(isinstance(n, int) for n in (want.num_tokens, want.append_tokens)):
            raise UserError(
                f"request {want.key!r} of {want.num_tokens!r} + {want.append_tokens!r} tokens",
                remedy="give whole numbers",
            )
        total = want.num_tokens + want.append_tokens
        if min(want.num_tokens, want.append_tokens) < 0 or total > _MAX_TOKENS:
            raise UserError(
                f"request {want.key!r} of {want.num_tokens} + {want.append_tokens} tokens",
                remedy=f"both are at least 0, together at most {_MAX_TOKENS}",
            )
        full_blocks = want.num_tokens // self.layout.block_tokens
        if len(want.block_hashes) > full_blocks:
            raise UserError(
                f"request {want.key!r}: {len(want.block_hashes)} block hashes for {full_blocks} full blocks",
                remedy="only full prompt blocks can be shared",
            )
        for block_hash in want.block_hashes:
            if not _is_hash(block_hash):
                raise ArgumentTypeError(
                    f"request {want.key!r}: {block_hash!r} is no block hash",
                    remedy=f"a chain hash is {HASH_BYTES} bytes",
                )

    def put(self, keys: Sequence[str], values: Sequence[Mapping[str, Rows]]) -> None:
        """See KVStore.put. The requests stay held by this store until deleted, detached or closed."""
        self._usable()
        self._medium.check()
        _check_pairs("values", keys, values)
        lengths = [self._check_value(f"values[{i}]", value, None) for i, value in enumerate(values)]
        leases = self._directory.reserve(
            [Wanted(key, n) for key, n in zip(keys, lengths, strict=True)]
        )
        held = [self._held.add(lease, may_append=True) for lease in leases]
        try:
            for one, value in zip(held, values, strict=True):
                self._write_all(one.slot, value)
            self._publish(held)
        except BaseException:
            for one in held:
                self._held.remove(one.slot)
            self._directory.release([one.lease for one in held])
            raise

    def _write_all(self, slot: int, value: Mapping[str, Rows]) -> None:
        slots, start = np.array([slot], np.int64), np.zeros(1, np.int32)
        for component in self.layout.components:
            for index, layer in enumerate(component.layers):
                rows = value[component.name][index : index + 1]
                self._rows.append(slots, layer, start, rows, component.name)

    def get(self, keys: Sequence[str], out: Sequence[Mapping[str, Rows]]) -> BoolMask:
        """See KVStore.get."""
        self._usable()
        _check_pairs("out", keys, out)
        leases = self._directory.lease(keys)
        held = [
            None if lease is None else self._held.add(lease, may_append=False) for lease in leases
        ]
        try:
            for i, one in enumerate(held):
                if one is not None:
                    self._check_value(f"out[{i}]", out[i], one.entry.num_tokens)
            for one, value in zip(held, out, strict=True):
                if one is not None:
                    for component in self.layout.components:
                        self._rows.fetch(one.slot, component.name, 0, value[component.name])
        finally:
            self._release([one for one in held if one is not None])
        return np.array([one is not None for one in held], np.bool_)

    def _check_value(self, name: str, value: Mapping[str, Rows], num_tokens: int | None) -> int:
        """Check one request's arrays; returns its tokens."""
        wanted = {component.name for component in self.layout.components}
        if not isinstance(value, Mapping):
            raise ArgumentTypeError(
                f"{name}: got a {type(value).__name__}",
                remedy=f"give a dict with an array for each of {sorted(wanted)}",
            )
        if set(value) != wanted:
            raise UserError(
                f"{name}: got components {sorted(value)}, wanted {sorted(wanted)}",
                remedy="give one array for each component",
            )
        for component in self.layout.components:
            array = value[component.name]
            shape = (len(component.layers), num_tokens, component.row_bytes)
            check_array(f"{name}[{component.name!r}]", array, np.uint8, shape)
            num_tokens = array.shape[1]
        assert num_tokens is not None
        return num_tokens

    def exists(self, keys: Sequence[str]) -> BoolMask:
        """See KVStore.exists."""
        self._usable()
        _check_list("keys", keys)
        entries = self._directory.find(keys)
        return np.array([e is not None and e.state == "published" for e in entries], np.bool_)

    def delete(self, keys: Sequence[str]) -> int:
        """See KVStore.delete; this store's slots of the requests are stale at once."""
        self._usable()
        _check_list("keys", keys)
        generations = self._directory.delete(keys)
        for generation in generations:
            for held in self._held.of(generation):
                self._held.remove(held.slot)
        return len(generations)

    def slots(self, keys: Sequence[str]) -> SlotIds:
        """See KVStore.slots; takes a lease on what this store does not hold yet."""
        self._usable()
        _check_list("keys", keys)
        found = {key: self._held_entry(entry) for key, entry in self._find_all(keys).items()}
        missing = [key for key, held in found.items() if held is None]
        leases = self._directory.lease(missing)
        taken = [self._held.add(lease, may_append=False) for lease in leases if lease is not None]
        if len(taken) < len(missing):  # deleted by another process just now
            self._release(taken)
            raise KeyMissing(missing[leases.index(None)], device=self.device)
        found.update(zip(missing, taken, strict=True))
        return np.array([held.slot for key in keys if (held := found[key]) is not None], np.int64)

    def _find_all(self, keys: Sequence[str]) -> dict[str, Entry]:
        entries = dict(zip(keys, self._directory.find(keys), strict=True))
        for key, entry in entries.items():
            if entry is None:
                raise KeyMissing(key, device=self.device)
        return {key: entry for key, entry in entries.items() if entry is not None}

    def _held_entry(self, entry: Entry) -> Held | None:
        return next(iter(self._held.of(entry.generation)), None)

    def length(self, slot: int) -> int:
        """See KVStore.length."""
        self._usable()
        return self._held.tables.min_length(self._held.get(slot).slot)

    # -- hot path -----------------------------------------------------------------------------------------
    def gather(
        self,
        slots: SlotIds,
        layer: int,
        tokens: TokenIds,
        out: Rows,
        *,
        component: str = "kv",
        out_rows: TokenIds | None = None,
        packed: bool = False,
    ) -> int:
        """See KVStore.gather."""
        self._usable()
        if packed and Capability.PACKED not in self.capabilities:
            raise UserError(
                f"{self.device}: nobody packs rows on this medium",
                remedy="call gather() without packed where Capability.PACKED is missing",
            )
        return self._rows.gather(slots, layer, tokens, out, component, out_rows, packed)

    def fetch(self, slot: int, component: str, start: int, out: Rows) -> None:
        """See KVStore.fetch."""
        self._usable()
        self._held.get(slot)
        start = whole_number("start", start)
        self._rows.fetch(slot, component, start, out)

    def append(
        self, slots: SlotIds, layer: int, start: TokenIds, rows: Rows, *, component: str = "kv"
    ) -> None:
        """See KVStore.append; published tokens cannot be written either."""
        self._usable()
        self._rows.append(slots, layer, start, rows, component)

    def _open_for_append(self, slot: int) -> None:
        held = self._held.get(slot)
        self._directory.take_append_right(held.lease, held.entry.num_tokens)
        self._held.set_append(held, may_append=True)

    # -- sharing ------------------------------------------------------------------------------------------
    def publish(self, key: str) -> Descriptor:
        """See KVStore.publish; a published key that this store does not hold is described as it stands."""
        self._usable()
        self._medium.check()
        entry = self._find_all([key])[key]
        held = self._held_entry(entry)
        if held is not None:
            self._publish([held])
            entry = self._find_all([key])[key]
        return Descriptor(
            device=self._directory.pool.uuid,
            key=key,
            generation=entry.generation,
            layout=self.layout.fingerprint(),
            prompt_tokens=entry.prompt_tokens,
            num_tokens=entry.num_tokens,
            blocks=entry.blocks,
        )

    def _publish(self, held: Sequence[Held]) -> None:
        """Publish what these slots may append to; after the first publish the right to append is free."""
        writing = [one for one in held if one.may_append]
        lengths = [self._held.tables.min_length(one.slot) for one in writing]
        self._directory.publish([(one.lease, n) for one, n in zip(writing, lengths, strict=True)])
        for one, num_tokens in zip(writing, lengths, strict=True):
            first = one.entry.state == "reserved"
            one.entry = replace(one.entry, state="published", num_tokens=num_tokens)
            self._held.set_append(one, may_append=not first)

    def attach(self, descriptor: Descriptor) -> int:
        """See KVStore.attach; the slot holds what is published now, which may be more than the descriptor says."""
        self._usable()
        if not isinstance(descriptor, Descriptor):
            raise ArgumentTypeError(
                f"attach: got a {type(descriptor).__name__}",
                remedy="give a Descriptor; Descriptor.from_bytes() reads the wire form",
            )
        self._medium.check()
        if descriptor.layout != self.layout.fingerprint():
            raise LayoutMismatch(
                device=self.device,
                found=descriptor.layout.hex(),
                expected=self.layout.fingerprint().hex(),
                rows=self.layout.describe(),
                remedy="open the store with the layout of the one that published",
            )
        return self._held.add(self._directory.attach(descriptor), may_append=False).slot

    def detach(self, slot: int) -> None:
        """See KVStore.detach."""
        self._usable()
        self._release([self._held.get(slot)])

    def _release(self, held: Sequence[Held]) -> None:
        for one in held:
            self._held.remove(one.slot)
        self._directory.release([one.lease for one in held])

    # -- figures ------------------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """See KVStore.stats."""
        self._usable()
        stats = replace(
            self._rows.counters,
            capacity_bytes=self._directory.pool.num_blocks * self.layout.block_bytes,
            used_bytes=self._directory.used_blocks() * self.layout.block_bytes,
        )
        self._medium.add_stats(stats)
        stats.metadata_lines_flushed = self._directory.lines_flushed
        return stats

    def reset_stats(self) -> None:
        """See KVStore.reset_stats."""
        self._usable()
        self._rows.counters = Stats()
        self._medium.reset_stats()


def _is_hash(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == HASH_BYTES


def _check_list(name: str, values: object) -> None:
    """A string is no list of keys, and bytes are no list of hashes."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise ArgumentTypeError(
            f"{name}: got the {type(values).__name__} {values!r}", remedy="give a list"
        )


def _open_directory(
    medium: Medium, layout: KVLayout, options: StoreOptions
) -> Directory | SharedDirectory:
    """In the device's own memory where this process can load and store there; else in a file beside it."""
    mapped = medium.mapped()
    if mapped is None:
        return Directory(medium, layout)
    return SharedDirectory(medium, mapped, layout, options)


def _check_pairs(name: str, keys: Sequence[str], values: Sequence[object]) -> None:
    _check_list("keys", keys)
    _check_list(name, values)
    if len(keys) != len(values):
        raise UserError(
            f"got {len(keys)} keys and {len(values)} {name}",
            remedy="give one for each key, in lists",
        )
