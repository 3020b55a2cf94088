"""A pool of small rows for the tests that go through many of them: its layout, and rows that follow from a key."""

from __future__ import annotations

import hashlib

import numpy as np

from emu import Component, KVLayout

LAYOUT = KVLayout((Component("kv", 64, (0, 1)),))
ROW = 64
NUM_BLOCKS = 48
DEVICE_BYTES = LAYOUT.device_bytes(NUM_BLOCKS)


def rows_of(key, num_tokens):
    """{"kv": uint8 [2, num_tokens, 64]}: every byte follows from the key and its place."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    words = np.arange(num_tokens * ROW // 8, dtype=np.uint64) + np.array(
        [[0], [1 << 32]], np.uint64
    )
    with np.errstate(over="ignore"):
        mixed = (words ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return {"kv": mixed.view(np.uint8).reshape(2, num_tokens, ROW)}


def read_slot(store, slot):
    """The rows of a slot."""
    out = np.empty((2, store.length(slot), ROW), np.uint8)
    store.fetch(slot, "kv", 0, out)
    return out
