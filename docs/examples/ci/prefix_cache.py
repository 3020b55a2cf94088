"""Your code on emu's store interface: the KV of prompts, found again by their longest stored prefix."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emu import KVStore


class PrefixCache:
    """Keeps the KV rows of prompts in a store, under a hash of their tokens.

    Args:
        store: on any medium.
        block_tokens: prefixes of a multiple of this are found.
    """

    def __init__(self, store: KVStore, block_tokens: int = 64) -> None:
        self._store = store
        self._block_tokens = block_tokens

    def insert(self, tokens: Sequence[int], kv: np.ndarray) -> None:
        """Store kv, uint8 [layers, tokens, row_bytes], for every whole block of the prompt."""
        whole = len(tokens) // self._block_tokens * self._block_tokens
        for end in range(self._block_tokens, whole + 1, self._block_tokens):
            key = self._key(tokens[:end])
            if not self._store.exists([key])[0]:
                self._store.put([key], [{"kv": np.ascontiguousarray(kv[:, :end])}])

    def longest_prefix(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt are in the cache."""
        whole = len(tokens) // self._block_tokens * self._block_tokens
        ends = range(whole, 0, -self._block_tokens)
        return next((n for n in ends if self._store.exists([self._key(tokens[:n])])[0]), 0)

    def rows(self, prefix: Sequence[int], layer: int, picked: Sequence[int]) -> np.ndarray:
        """The rows of some tokens of a stored prefix: uint8 [picked, row_bytes]."""
        row_bytes = self._store.layout.components[0].row_bytes
        out = self._store.buffer(len(picked) * row_bytes).reshape(1, len(picked), row_bytes)
        slots = self._store.slots([self._key(prefix)])
        self._store.gather(slots, layer, np.array([picked], np.int32), out)
        return out[0].copy()

    @staticmethod
    def _key(tokens: Sequence[int]) -> str:
        return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()
