"""The directory of a pool whose real directory is on another host: what descriptors say is all that is known.

Hosts that share a CXL device share no file. Whoever formatted the device keeps its directory; the others read and
append to the requests that they were given descriptors of. The owner must hold a request as long as others use it
(its leases do not know of them), and gives a descriptor to one host at a time that may append. What such a host
appended goes back to the owner in the descriptor that its publish() returns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from emu.errors import LayoutMismatch, MediumError, StaleDescriptor, UserError
from emu.layout import HEADER_BYTES
from emu.pool.header import ForeignHeader, Header, parse_page
from emu.pool.records import Entry, Lease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu.layout import KVLayout
    from emu.pool.medium import Medium
    from emu.pool.records import Wanted
    from emu.store import Descriptor


class BorrowedDirectory:
    """As Directory, of what was attached here.

    Args:
        medium: formatted by the owner.
        layout: must be the owner's.

    Raises:
        MediumError: the device holds no pool.
        LayoutMismatch: it holds one of another layout.
    """

    def __init__(self, medium: Medium, layout: KVLayout) -> None:
        self.device = medium.name
        self._medium = medium
        self._layout = layout
        self.pool = self._read_header()
        self._entries: dict[int, Entry] = {}  # by generation
        self._leases: dict[int, int] = {}  # generation by lease
        self._appenders: dict[int, int] = {}  # lease by generation
        self._last = 0

    def _read_header(self) -> Header:
        try:
            header = parse_page(self._medium.read(0, HEADER_BYTES))
        except ForeignHeader as error:
            raise self._no_pool(str(error)) from error
        if header is None:
            raise self._no_pool("the device was never formatted")
        if header.layout != self._layout.fingerprint():
            raise LayoutMismatch(
                device=self.device,
                found=header.layout.hex(),
                expected=self._layout.fingerprint().hex(),
                remedy="open it with the owner's layout",
            )
        if header.num_blocks > self._layout.num_blocks(self._medium.size_bytes):
            raise self._no_pool(f"its pool has {header.num_blocks} blocks, more than fit it")
        return header

    def _no_pool(self, words: str) -> MediumError:
        return MediumError(
            f"{self.device}: no pool of another host here: {words}",
            device=self.device,
            status="NO_POOL",
            remedy="open the device on its owner first",
        )

    def _check(self) -> None:
        if self._read_header() != self.pool:
            raise MediumError(
                f"{self.device}: its owner has formatted the device anew",
                device=self.device,
                status="POOL_REPLACED",
                remedy="open the store again",
            )

    def close(self) -> None:
        """Nothing is kept outside this process."""

    def attach(self, descriptor: Descriptor) -> Lease:
        """Hold what a descriptor says.

        Raises:
            StaleDescriptor: it is of another pool, or contradicts what is known of that request here.
            MediumError: the pool is no more.
        """
        self._check()
        known = self._entries.get(descriptor.generation)
        entry = known or entry_from(descriptor)
        same = (entry.key, entry.blocks) == (descriptor.key, descriptor.blocks)
        room = room_for_tokens(entry, self._layout)
        if (
            descriptor.device != self.pool.uuid
            or not same
            or descriptor.num_tokens > room
            or max(descriptor.blocks, default=0) >= self.pool.num_blocks
        ):
            raise StaleDescriptor(
                device=self.device, key=descriptor.key, generation=descriptor.generation
            )
        num_tokens = max(entry.num_tokens, descriptor.num_tokens)
        self._entries[entry.generation] = replace(entry, num_tokens=num_tokens)
        return self._add_lease(entry.generation)

    def _add_lease(self, generation: int) -> Lease:
        self._last += 1
        self._leases[self._last] = generation
        return Lease(self._last, self._entries[generation])

    def find(self, keys: Sequence[str]) -> list[Entry | None]:
        """The requests of these names that are attached here."""
        by_key = {entry.key: entry for entry in self._entries.values()}
        return [by_key.get(key) for key in keys]

    def lease(self, keys: Sequence[str]) -> list[Lease | None]:
        """One more lease on each that is attached here."""
        self._check()
        found = self.find(keys)
        return [None if entry is None else self._add_lease(entry.generation) for entry in found]

    def take_append_right(self, lease: int, num_tokens: int) -> None:
        """Become the one on this host that may append.

        Raises:
            UserError: another slot of this store has the right, or the request has grown since the attachment.
        """
        entry = self._entries[self._leases[lease]]
        if self._appenders.setdefault(entry.generation, lease) != lease:
            raise UserError(
                f"{self.device}: another attacher appends to request {entry.key!r}",
                remedy="one attacher at a time may append; wait until it detaches",
            )
        if entry.num_tokens != num_tokens:
            raise UserError(
                f"{self.device}: request {entry.key!r} has grown to {entry.num_tokens} tokens,"
                f" this attachment knows of {num_tokens}",
                remedy="detach and attach again before appending",
            )

    def publish(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Note what the appenders wrote: the next descriptor says it."""
        self._check()
        for lease, num_tokens in lengths:
            entry = self._entries[self._leases[lease]]
            if self._appenders.get(entry.generation) == lease:
                self._entries[entry.generation] = replace(entry, num_tokens=num_tokens)

    def release(self, leases: Sequence[int]) -> None:
        """Drop leases; a request without any is forgotten."""
        for lease in leases:
            generation = self._leases.pop(lease)
            if self._appenders.get(generation) == lease:
                del self._appenders[generation]
            if generation not in self._leases.values():
                del self._entries[generation]

    def used_blocks(self) -> int:
        """Blocks of the requests that are attached here."""
        return len({block for entry in self._entries.values() for block in entry.blocks})

    def reserve(self, wanted: Sequence[Wanted]) -> NoReturn:
        """Refused: only the owner knows what is free."""
        del wanted
        raise self._owners("reserve or put requests")

    def delete(self, keys: Sequence[str]) -> NoReturn:
        """Refused: only the owner deletes."""
        del keys
        raise self._owners("delete requests")

    def _owners(self, what: str) -> UserError:
        return UserError(
            f"{self.device}: the pool's directory is on another host, only there one can {what}",
            remedy="do it there, and give this host the descriptor",
        )


def entry_from(descriptor: Descriptor) -> Entry:
    """What a descriptor says, as a directory's entry."""
    return Entry(
        generation=descriptor.generation,
        key=descriptor.key,
        state="published",
        prompt_tokens=descriptor.prompt_tokens,
        num_tokens=descriptor.num_tokens,
        shared_tokens=0,
        blocks=descriptor.blocks,
    )


def room_for_tokens(entry: Entry, layout: KVLayout) -> int:
    """Tokens that a request's blocks hold: the prompt's, then whole blocks for what is appended."""
    appended = len(entry.blocks) - layout.blocks_for(entry.prompt_tokens)
    return entry.prompt_tokens + appended * layout.block_tokens
