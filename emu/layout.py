"""Where the KV rows of requests lie on a device: pure arithmetic, layer first, in blocks of tokens.

A device is `[header | region of (component 0, its layer 0) | region of (component 0, its layer 1) | ... | metadata]`.
Every region holds the same number of blocks, a block holds `block_tokens` rows of one component and layer,
and block b means the same tokens in every region: one block number stands for a token range's whole KV.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from emu.errors import UserError

HEADER_BYTES = 4096
LINE_BYTES = 64
POOL_SLOTS = 16
"""Stores that can have a pool's device open at once."""

_PAGE_BYTES = 4096
_REGISTER_LINES = 16


@dataclass(frozen=True, slots=True)
class MetadataLayout:
    """The metadata of a pool, behind its last region: docs/pool-format.md.

    Attributes:
        slots: stores that can be open at once.
        ring_lines: lines of each slot's log.
        snapshot_lines: lines of each of its two snapshots.
    """

    slots: int
    ring_lines: int
    snapshot_lines: int

    @classmethod
    def of(cls, num_blocks: int) -> MetadataLayout:
        """What a pool of that many blocks gets: a log for a request of all of them, a snapshot of each block's own."""
        return cls(POOL_SLOTS, 512 + 3 * num_blocks, 256 + 3 * num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return (
            self.slots * LINE_BYTES * (_REGISTER_LINES + self.ring_lines + 2 * self.snapshot_lines)
        )


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of row.

    Attributes:
        name: "kv" (latent and rope of a token) or "index" (a token's index key).
        row_bytes: bytes of one row: 1152 (BF16) or 656 (FP8) for kv, 132 for index keys.
        layers: the model layers that keep such rows, ascending.
    """

    name: str
    row_bytes: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    """The layout of one device.

    Attributes:
        components: the kinds of rows, in region order.
        block_tokens: tokens per block; a block of each component is a whole number of 64-byte lines, so two
            writers of different blocks never write the same line.
    """

    components: tuple[Component, ...]
    block_tokens: int = 64

    def __post_init__(self) -> None:
        """Refuse a layout whose blocks are not whole lines.

        Raises:
            UserError (a ValueError): names the component.
        """
        for component in self.components:
            if component.row_bytes <= 0 or component.row_bytes * self.block_tokens % LINE_BYTES:
                raise UserError(
                    f"a block of {self.block_tokens} rows of {component.row_bytes} bytes ({component.name}) "
                    f"is not a whole number of {LINE_BYTES}-byte lines"
                )
            if not component.layers:
                raise UserError(f"component {component.name!r} has no layers")

    @cached_property
    def regions(self) -> tuple[tuple[str, int], ...]:
        """(component name, model layer) of every region, in order."""
        return tuple((c.name, layer) for c in self.components for layer in c.layers)

    @cached_property
    def region_row_bytes(self) -> tuple[int, ...]:
        """Row bytes of every region, in order."""
        return tuple(c.row_bytes for c in self.components for _ in c.layers)

    @cached_property
    def _region_of(self) -> dict[tuple[str, int], int]:
        return {region: number for number, region in enumerate(self.regions)}

    def component(self, name: str) -> Component:
        """The component of that name.

        Raises:
            KeyError: no such component.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"no component {name!r}; there are {[c.name for c in self.components]}")

    def region(self, component: str, layer: int) -> int:
        """Number of the region that holds this component of this model layer.

        Raises:
            KeyError: the layer keeps no such rows.
        """
        try:
            return self._region_of[component, layer]
        except KeyError:
            raise KeyError(f"layer {layer} keeps no {component!r} rows") from None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all components and layers."""
        return sum(self.region_row_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return self.block_tokens * self.token_bytes

    def num_blocks(self, device_bytes: int) -> int:
        """Blocks that fit a device of that size, with their metadata."""
        fixed, per_block = self.device_bytes(0), self.block_bytes + _metadata_bytes_per_block()
        blocks = max(0, device_bytes - fixed + _PAGE_BYTES) // per_block
        while blocks > 0 and self.device_bytes(blocks) > device_bytes:
            blocks -= 1  # the metadata begins on a page
        return blocks

    def metadata_offset(self, num_blocks: int) -> int:
        """Byte offset of the metadata of a device with that many blocks."""
        end = HEADER_BYTES + num_blocks * self.block_bytes
        return -(-end // _PAGE_BYTES) * _PAGE_BYTES

    def device_bytes(self, num_blocks: int) -> int:
        """Size of a device with that many blocks, in whole pages."""
        end = self.metadata_offset(num_blocks) + MetadataLayout.of(num_blocks).nbytes
        return -(-end // _PAGE_BYTES) * _PAGE_BYTES

    def region_offset(self, region: int, num_blocks: int) -> int:
        """Byte offset of a region from the start of a device with that many blocks."""
        return HEADER_BYTES + num_blocks * self.block_tokens * sum(self.region_row_bytes[:region])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-num_tokens // self.block_tokens)

    def describe(self) -> str:
        """The rows in words, for a message."""
        rows = (f"{c.name} {c.row_bytes} B in {len(c.layers)} layers" for c in self.components)
        return f"{', '.join(rows)}, {self.block_tokens} tokens a block"

    def fingerprint(self) -> bytes:
        """16 bytes; peers that disagree refuse to attach."""
        text = repr((self.block_tokens, [(c.name, c.row_bytes, c.layers) for c in self.components]))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _metadata_bytes_per_block() -> int:
    return MetadataLayout.of(1).nbytes - MetadataLayout.of(0).nbytes
