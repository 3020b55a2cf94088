"""The first page of a device: whose pool it is."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from emu.layout import HEADER_BYTES

MAGIC = b"EMUPOOL1"
VERSION = 1

# magic, version, zero, pool uuid, layout fingerprint, number of blocks; then CRC-32; zero to the page's end
_BODY = struct.Struct("<8sII16s16sQ")
_CRC = struct.Struct("<I")
_USED = _BODY.size + _CRC.size


class ForeignHeader(Exception):
    """The page holds neither zeros nor an intact header of ours; the text says what it holds."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a formatted device says of itself.

    Attributes:
        uuid: the pool's identity, 16 bytes, new at every format.
        layout: fingerprint of the layout, 16 bytes.
        num_blocks: blocks in every region; with the layout it fixes where every row lies.
    """

    uuid: bytes
    layout: bytes
    num_blocks: int

    def to_bytes(self) -> bytes:
        """What the page begins with; the rest of it is zero."""
        body = _BODY.pack(MAGIC, VERSION, 0, self.uuid, self.layout, self.num_blocks)
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
    magic, version, _, uuid, layout, num_blocks = _BODY.unpack_from(page)
    if magic != MAGIC:
        raise ForeignHeader(f"foreign data beginning {page[:16].hex(' ')}")
    if zlib.crc32(page[: _BODY.size]) != _CRC.unpack_from(page, _BODY.size)[0]:
        raise ForeignHeader("a damaged pool header: its checksum does not match")
    if version != VERSION:
        raise ForeignHeader(f"a pool of version {version}, this emu reads {VERSION}")
    if any(page[_USED:]):
        raise ForeignHeader("a pool header followed by foreign data")
    return Header(uuid, layout, num_blocks)
