"""The prompts that a trace's hash ids stand for: traces hold no text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from emu.trace.request import BLOCK_TOKENS

if TYPE_CHECKING:
    from emu.trace.request import Request

_WORD = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
HASH_BYTES = 16


def prompt_tokens(request: Request, vocab: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The prompt of a request, int64 [input_tokens], each token in 0..vocab-1.

    Every hash id stands for the same 512 tokens wherever it occurs, a partial last block for the head of
    them. The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) keyed by seed and id: the same tokens on
    every machine.

    Raises:
        ValueError: a vocabulary or seed out of range.
    """
    if not 1 <= vocab < 1 << 63:
        raise ValueError(f"vocab: got {vocab}, wanted 1..2^63-1")
    if not 0 <= seed <= _WORD:
        raise ValueError(f"seed: got {seed}, wanted 0..2^64-1")
    ids = request.hash_ids
    low = np.array([i & _WORD for i in ids], dtype=np.uint64)
    high = np.array([i >> 64 for i in ids], dtype=np.uint64)
    key = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
    for word in (low, high):
        key = _mix((key ^ word) + _GAMMA)
    steps = np.arange(1, BLOCK_TOKENS + 1, dtype=np.uint64) * _GAMMA
    draws = _mix(key[:, None] + steps[None, :])
    tokens = (draws % np.uint64(vocab)).astype(np.int64).reshape(-1)
    return tokens[: request.input_tokens].copy()


def block_hashes(tokens: npt.NDArray[np.int64], block_tokens: int = 64) -> list[bytes]:
    """Chain hashes of a prompt's full blocks, 16 bytes each.

    A block's hash covers the block and everything before it, so equal hashes mean equal prefixes.

    Args:
        tokens: int64 [n].
        block_tokens: tokens per block.
    """
    words = np.ascontiguousarray(tokens, dtype="<i8")
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(words) - block_tokens + 1, block_tokens):
        block = words[start : start + block_tokens].tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
