"""The wire form of a descriptor: little-endian, versioned, checksummed, bounded; never pickle."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from emu.errors import ArgumentTypeError, UserError
from emu.store import Descriptor

MAGIC = b"EMUD"
VERSION = 1
MAX_KEY_BYTES = 1024
MAX_DESCRIPTOR_BYTES = 16 << 20  # four million blocks: more than any context needs

# magic, version, key bytes, blocks, generation, prompt tokens, tokens, device, layout; then key, blocks, CRC-32
_HEAD = struct.Struct("<4sHHIQQQ16s16s")
_CRC = struct.Struct("<I")
MAX_GENERATION = (1 << 63) - 1
_MAX_TOKENS = (1 << 31) - 1  # token indices are int32
_REMEDY = "get the descriptor from publish() again"


def key_bytes(key: str) -> bytes:
    """A key in UTF-8.

    Raises:
        UserError: not a string, empty, not UTF-8, or longer than MAX_KEY_BYTES.
    """
    try:
        raw = key.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UserError(f"{key!r} is not a key", remedy="a key is a string of UTF-8") from error
    if not 0 < len(raw) <= MAX_KEY_BYTES:
        raise UserError(
            f"a key of {len(raw)} bytes", remedy=f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8"
        )
    return raw


def descriptor_to_bytes(descriptor: Descriptor) -> bytes:
    """The wire form: at most MAX_DESCRIPTOR_BYTES.

    Raises:
        UserError: a field that the wire form cannot hold.
    """
    key = key_bytes(descriptor.key)
    if len(descriptor.device) != 16 or len(descriptor.layout) != 16:
        raise UserError("a descriptor's device and layout are 16 bytes each", remedy=_REMEDY)
    try:
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            len(key),
            len(descriptor.blocks),
            descriptor.generation,
            descriptor.prompt_tokens,
            descriptor.num_tokens,
            descriptor.device,
            descriptor.layout,
        )
        blocks = np.array(descriptor.blocks, dtype="<i4").tobytes()
    except (struct.error, OverflowError) as error:
        raise UserError(f"no wire form for this descriptor: {error}", remedy=_REMEDY) from error
    body = head + key + blocks
    if len(body) + _CRC.size > MAX_DESCRIPTOR_BYTES:
        raise UserError(
            f"a descriptor of {len(descriptor.blocks)} blocks is longer than {MAX_DESCRIPTOR_BYTES} bytes",
            remedy="use larger blocks",
        )
    return body + _CRC.pack(zlib.crc32(body))


def descriptor_from_bytes(raw: bytes) -> Descriptor:
    """Read the wire form.

    Raises:
        UserError: not a descriptor, of another version, of another length than it says, or damaged.
    """
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"a {type(raw).__name__} is not a descriptor", remedy=_REMEDY)
    raw = bytes(raw)
    if len(raw) > MAX_DESCRIPTOR_BYTES:
        raise _refuse(f"{len(raw)} bytes are too long for a descriptor")
    if len(raw) < _HEAD.size + _CRC.size or not raw.startswith(MAGIC):
        raise _refuse(f"{len(raw)} bytes beginning {raw[:8]!r} are not a descriptor")
    _, version, key_length, num_blocks, generation, prompt_tokens, num_tokens, device, layout = (
        _HEAD.unpack_from(raw)
    )
    if version != VERSION:
        raise _refuse(f"a descriptor of version {version}, this emu reads {VERSION}")
    wanted = _HEAD.size + key_length + 4 * num_blocks + _CRC.size
    if len(raw) != wanted:
        raise _refuse(f"a descriptor of {len(raw)} bytes that says it has {wanted}")
    if zlib.crc32(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
        raise _refuse("a damaged descriptor: its checksum does not match")
    blocks = np.frombuffer(raw, dtype="<i4", count=num_blocks, offset=_HEAD.size + key_length)
    tokens = max(prompt_tokens, num_tokens)
    if tokens > _MAX_TOKENS or generation > MAX_GENERATION or (blocks < 0).any():
        raise _refuse("a descriptor with an impossible generation, tokens or blocks")
    try:
        key = raw[_HEAD.size : _HEAD.size + key_length].decode()
    except UnicodeDecodeError as error:
        raise _refuse("a descriptor whose key is not UTF-8") from error
    return Descriptor(
        device=device,
        key=key,
        generation=generation,
        layout=layout,
        prompt_tokens=prompt_tokens,
        num_tokens=num_tokens,
        blocks=tuple(blocks.tolist()),
    )


def _refuse(message: str) -> UserError:
    return UserError(message, remedy=_REMEDY)
