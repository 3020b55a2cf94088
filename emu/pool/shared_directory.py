"""The directory of one device in the device's own memory: no server, no file beside it (docs/pool-format.md)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from emu import _native
from emu.descriptor_wire import key_bytes
from emu.errors import (
    HostExpired,
    KeyExists,
    KeyMissing,
    MediumError,
    StaleDescriptor,
    StoreError,
    StoreFull,
    UserError,
)
from emu.layout import POOL_SLOTS
from emu.pool.records import STATES, Entry, Lease, Wanted
from emu.pool.shared_opening import machine_lock, native_pool, open_shared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from emu.layout import KVLayout
    from emu.pool.medium import MappedMemory, Medium
    from emu.store import Descriptor, StoreOptions

MIN_EXPIRY_S, MAX_EXPIRY_S = 0.1, 86400.0  # a heartbeat is a twentieth

_NativeEntry = tuple[int, int, int, int, int, int, int, list[int]]


class SharedDirectory:
    """One store's view of its device's directory; the methods are Directory's.

    Raises:
        UserError, MediumError, LayoutMismatch: the device cannot be used; see open_shared().
    """

    def __init__(
        self, medium: Medium, mapped: MappedMemory, layout: KVLayout, options: StoreOptions
    ) -> None:
        self.device = medium.name
        self._layout = layout
        self._in_call = False
        _check_options(medium.name, options)
        with machine_lock(mapped, medium.name), self._faults():
            self.pool = open_shared(medium, mapped, layout)
            self._native: _native.SharedPool | None = native_pool(
                mapped, self.pool, options.expiry_s
            )
            self._native.join(*options.pool_slots)

    @property
    def _pool(self) -> _native.SharedPool:
        assert self._native is not None
        return self._native

    def close(self) -> None:
        """Release every lease of this store; a pool that is gone, or that gave this store up, is no error."""
        pool, self._native = self._native, None
        try:
            with self._faults():
                if pool is not None:
                    pool.leave()
        except StoreError:
            pass  # nothing of ours is left in it

    def abandon(self) -> None:
        """Forget the mapping without a word to others: for a forked child, whose parent has the store."""
        self._native = None

    def validate(self) -> None:
        """Refuse to go on when this store's leases may be gone: what was just copied counts only then.

        Raises:
            HostExpired: it was paused for too long.
        """
        with self._faults():
            self._pool.validate()

    # -- writing ------------------------------------------------------------------------------------------
    def reserve(self, wanted: Sequence[Wanted]) -> list[Lease]:
        """Make room for all of them or for none.

        Raises:
            KeyExists, StoreFull, UserError: nothing was changed.
        """
        wants = [
            (
                key_bytes(want.key).decode(),
                want.num_tokens,
                want.append_tokens,
                self._layout.blocks_for(want.num_tokens)
                + self._layout.blocks_for(want.append_tokens),
                list(want.block_hashes),
            )
            for want in wanted
        ]
        with self._faults():
            made = self._pool.reserve(wants)
        return [_lease(want.key, entry) for want, entry in zip(wanted, made, strict=True)]

    def publish(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Make requests visible, or refresh what they hold; see Directory.publish.

        Raises:
            KeyMissing: the request was deleted; nothing of the batch was published.
        """
        with self._faults():
            self._pool.publish(list(lengths))

    def take_append_right(self, lease: int, num_tokens: int) -> None:
        """Become the one that may append; see Directory.take_append_right.

        Raises:
            UserError: another lease has the right, or the request has grown since the caller attached.
        """
        with self._faults():
            self._pool.take_append_right(lease, num_tokens)

    def delete(self, keys: Sequence[str]) -> list[int]:
        """Forget published requests and own reserved ones; returns their generations."""
        with self._faults():
            return self._pool.remove(_checked(keys))

    # -- reading ------------------------------------------------------------------------------------------
    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        """The published requests of these names, and own reserved ones; None where there is none."""
        with self._faults():
            found = self._pool.find(_checked(keys))
        return [
            _lease(key, entry).entry if entry[1] else None
            for key, entry in zip(keys, found, strict=True)
        ]

    def lease(self, keys: Sequence[str]) -> list[Lease | None]:
        """Take a lease on each published request; None where there is none."""
        with self._faults():
            taken = self._pool.lease(_checked(keys))
        return [
            _lease(key, entry) if entry[0] else None for key, entry in zip(keys, taken, strict=True)
        ]

    def attach(self, descriptor: Descriptor) -> Lease:
        """Take a lease on what a descriptor names.

        Raises:
            StaleDescriptor: it is gone, or was on another pool.
        """
        stale = StaleDescriptor(
            device=self.device,
            key=descriptor.key,
            generation=descriptor.generation,
            belongs_to=descriptor.device.hex(),
            uuid=self.pool.uuid.hex(),
        )
        if descriptor.device != self.pool.uuid:
            raise stale
        with self._faults(gone=stale):
            entry = self._pool.attach(
                descriptor.generation, descriptor.key, list(descriptor.blocks)
            )
        return _lease(descriptor.key, entry)

    def release(self, leases: Sequence[int]) -> None:
        """Drop leases; a deleted request's blocks return with the last one."""
        with self._faults():
            self._pool.release(list(leases))

    def used_blocks(self) -> int:
        """Blocks that some request names, after taking back what dead stores held."""
        with self._faults():
            return self._pool.used_blocks()

    @property
    def lines_flushed(self) -> int:
        """Lines of metadata written back or dropped by software coherence."""
        return self._pool.lines_flushed

    # -- faults -------------------------------------------------------------------------------------------
    @contextmanager
    def _faults(self, gone: StoreError | None = None) -> Iterator[None]:
        if self._in_call:  # the native calls let other threads run
            raise UserError(
                f"{self.device}: two threads use one store", remedy="open one store per thread"
            )
        self._in_call = True
        try:
            yield
        except _native.PoolRefusal as refusal:
            raise self._refused(*refusal.args, gone=gone) from None
        except _native.PoolFault as fault:
            raise pool_error(self.device, *fault.args) from None
        finally:
            self._in_call = False

    def _refused(
        self, kind: str, key: str, first: int, second: int, *, gone: StoreError | None
    ) -> Exception:
        if kind == "KEY_EXISTS":
            return KeyExists(key, device=self.device)
        if kind == "NO_ROOM":
            return StoreFull(
                device=self.device,
                needed_bytes=first * self._layout.block_bytes,
                free_bytes=second * self._layout.block_bytes,
                capacity_bytes=self.pool.num_blocks * self._layout.block_bytes,
            )
        if kind == "GONE":
            return gone or KeyMissing(key, device=self.device)
        if kind == "LEASE_LOST":
            return MediumError(
                f"{self.device}: lease {key} was taken away",
                device=self.device,
                status=kind,
                remedy="open the store again",
            )
        return UserError(*self._advice(kind, key, first, second))

    def _advice(self, kind: str, key: str, first: int, second: int) -> tuple[str]:
        if kind == "APPENDER":
            text = f"another attacher appends to request {key!r}; one at a time may: wait until it detaches"
        elif kind == "GROWN":
            text = (
                f"request {key!r} has grown to {first} tokens, this attachment knows of {second};"
                " detach and attach again before appending"
            )
        else:
            text = (
                f"request {key!r} and its batch take {first} bytes of metadata at once, more than the pool has;"
                " put fewer requests at a time, or detach what is not needed any more"
            )
        return (f"{self.device}: {text}",)


def pool_error(device: str, kind: str, text: str) -> StoreError:
    """What is wrong with a pool as a whole, or with this store's place in it."""
    if kind == "EXPIRED":
        return HostExpired(device=device, reason=text)
    if kind == "REPLACED":
        return MediumError(
            f"{device}: another process has formatted the device anew, or its first line is damaged",
            device=device,
            status="POOL_REPLACED",
            remedy="open the store again",
        )
    status, remedy = {
        "TRUNCATED": ("DEVICE_TRUNCATED", "make the device anew: `emu down`, `emu up`"),
        "BUSY": ("NO_SLOT", "close a store that is open on it"),
        "FULL": ("METADATA_FULL", "detach or delete what is not needed any more"),
        "DAMAGED": (
            "METADATA_DAMAGED",
            "`emu pool check` says what is damaged, `emu pool check --repair` mends it",
        ),
    }[kind]
    return MediumError(f"{device}: {text}", device=device, status=status, remedy=remedy)


def _check_options(device: str, options: StoreOptions) -> None:
    first, last = options.pool_slots
    if not 0 <= first < last <= POOL_SLOTS:
        raise UserError(
            f"{device}: pool_slots {options.pool_slots}",
            remedy=f"give [first, last) of the slots 0 to {POOL_SLOTS}",
        )
    if not MIN_EXPIRY_S <= options.expiry_s <= MAX_EXPIRY_S:
        raise UserError(
            f"{device}: expiry_s {options.expiry_s}",
            remedy=f"give {MIN_EXPIRY_S} to {MAX_EXPIRY_S} s",
        )


def _checked(keys: Sequence[str]) -> list[str]:
    return [key_bytes(key).decode() for key in keys]


def _lease(key: str, native: _NativeEntry) -> Lease:
    number, generation, state, prompt_tokens, num_tokens, append_tokens, shared_tokens, blocks = (
        native
    )
    return Lease(
        number,
        Entry(
            generation=generation,
            key=key,
            state=STATES[state],
            prompt_tokens=prompt_tokens,
            num_tokens=num_tokens,
            append_tokens=append_tokens,
            shared_tokens=shared_tokens,
            blocks=tuple(blocks),
        ),
    )
