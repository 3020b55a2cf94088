"""The same tests on DRAM, on CXL and on RDMA: kv_store is each in turn."""

import numpy as np
import pytest
from prefix_cache import PrefixCache

from emu import Component, KVLayout

ROW_BYTES, LAYERS = 656, 3


@pytest.fixture
def kv_layout():
    """What kv_store is opened with: FP8 rows of three layers, in place of the plugin's own."""
    return KVLayout((Component("kv", ROW_BYTES, layers=tuple(range(LAYERS))),))


@pytest.fixture
def prompt():
    return list(range(1000, 1200))


@pytest.fixture
def kv(prompt):
    shape = (LAYERS, len(prompt), ROW_BYTES)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_nothing_is_found_in_an_empty_cache(kv_store, prompt):
    assert PrefixCache(kv_store).longest_prefix(prompt) == 0


def test_whole_blocks_of_a_prompt_are_found(kv_store, prompt, kv):
    cache = PrefixCache(kv_store)
    cache.insert(prompt, kv)
    assert cache.longest_prefix(prompt) == 192
    assert cache.longest_prefix(prompt[:130] + [7] * 70) == 128
    assert cache.longest_prefix([7, *prompt]) == 0


def test_the_bytes_come_back(kv_store, prompt, kv):
    cache = PrefixCache(kv_store)
    cache.insert(prompt, kv)
    picked = [191, 0, 64, 63]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(cache.rows(prompt[:192], layer, picked), kv[layer, picked])
