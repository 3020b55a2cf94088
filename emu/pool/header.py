"""The first page of a device: whose pool it is."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emu.layout import HEADER_BYTES, MetadataLayout

if TYPE_CHECKING:
    from emu.layout import KVLayout

MAGIC = b"EMUPOOL1"
VERSION = 2

# magic, version, tokens of a block, pool uuid, layout fingerprint, number of blocks, place of the metadata: one line;
# slots, lines of a log, lines of a snapshot; then CRC-32; zero to the page's end
_BODY = struct.Struct("<8sII16s16sQQIII")
_CRC = struct.Struct("<I")
_USED = _BODY.size + _CRC.size


class ForeignHeader(Exception):
    """The page holds neither zeros nor an intact header of ours; the text says what it holds."""


_ELSEWHERE = MetadataLayout(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Header:
    """What a formatted device says of itself.

    Attributes:
        uuid: the pool's identity, 16 bytes, new at every format.
        layout: fingerprint of the layout, 16 bytes.
        num_blocks: blocks in every region; with the layout it fixes where every row lies.
        block_tokens: tokens of a block.
        meta_offset: bytes from the device's start to its metadata; 0 where that is kept elsewhere.
        metadata: its sizes.
    """

    uuid: bytes
    layout: bytes
    num_blocks: int
    block_tokens: int = 64
    meta_offset: int = 0
    metadata: MetadataLayout = _ELSEWHERE

    @classmethod
    def fresh(cls, layout: KVLayout, device_bytes: int) -> Header:
        """A new pool's, with its metadata on the device."""
        blocks = layout.num_blocks(device_bytes)
        return cls(
            os.urandom(16),
            layout.fingerprint(),
            blocks,
            layout.block_tokens,
            layout.metadata_offset(blocks),
            MetadataLayout.of(blocks),
        )

    @property
    def end(self) -> int:
        """Bytes from the device's start to the end of its metadata."""
        return self.meta_offset + self.metadata.nbytes

    def to_bytes(self) -> bytes:
        """What the page begins with; the rest of it is zero."""
        sizes = self.metadata
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.block_tokens,
            self.uuid,
            self.layout,
            self.num_blocks,
            self.meta_offset,
            sizes.slots,
            sizes.ring_lines,
            sizes.snapshot_lines,
        )
        return body + _CRC.pack(zlib.crc32(body))

    def to_page(self) -> bytes:
        """The page, HEADER_BYTES long."""
        return self.to_bytes().ljust(HEADER_BYTES, b"\0")


def parse_page(page: bytes) -> Header | None:
    """Read a device's first page; None for one that is all zero (never formatted).

    Raises:
        ForeignHeader: damaged, of another version, or not ours.
    """
    if not any(page):
        return None
    magic, version, tokens, uuid, layout, blocks, meta_offset, *sizes = _BODY.unpack_from(page)
    if magic != MAGIC:
        raise ForeignHeader(f"foreign data beginning {page[:16].hex(' ')}")
    if version != VERSION:
        raise ForeignHeader(f"a pool of version {version}, this emu reads {VERSION}")
    if zlib.crc32(page[: _BODY.size]) != _CRC.unpack_from(page, _BODY.size)[0]:
        raise ForeignHeader("a damaged pool header: its checksum does not match")
    if any(page[_USED:]):
        raise ForeignHeader("a pool header followed by foreign data")
    return Header(uuid, layout, blocks, tokens, meta_offset, MetadataLayout(*sizes))
