"""What the contract suite stands on: a place to open stores at, rows to compare, and child processes."""

from __future__ import annotations

import hashlib
import multiprocessing
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from emu import Component, KVLayout, StoreOptions, open_store

LAYOUT = KVLayout((Component("kv", 656, (0, 1, 2)), Component("index", 132, (1,))))
NUM_BLOCKS = 16
BLOCK = LAYOUT.block_tokens
MAX_TOKENS = 5 * BLOCK
DATA_BYTES = 4096 + NUM_BLOCKS * LAYOUT.block_bytes  # the rest is metadata
DEVICE_BYTES = LAYOUT.device_bytes(NUM_BLOCKS)
assert DEVICE_BYTES % 4096 == 0
assert DATA_BYTES < DEVICE_BYTES


@dataclass(frozen=True)
class Place:
    """Where a store is, in a form that a spawned process can take."""

    url: str
    options: StoreOptions
    layout: KVLayout = LAYOUT

    def open(self):
        return open_store(self.url, self.layout, self.options)


@dataclass
class Opener:
    """Opens stores at a place and closes them when the test ends."""

    place: Place
    stores: list = field(default_factory=list)

    def __call__(self, **changes):
        options = replace(self.place.options, **changes)
        self.stores.append(replace(self.place, options=options).open())
        return self.stores[-1]


class ContractBase:
    """Fixtures; a medium's test class overrides `place` and `raw`."""

    @pytest.fixture
    def place(self):
        raise NotImplementedError

    @pytest.fixture
    def raw(self):
        """A function of the store that returns the device's bytes, read past the store."""
        raise NotImplementedError

    @pytest.fixture
    def make_store(self, place):
        opener = Opener(place)
        yield opener
        for store in opener.stores:
            store.close()

    @pytest.fixture
    def store(self, make_store):
        return make_store()


def need(store, capability):
    if capability not in store.capabilities:
        pytest.skip(f"{type(store).__name__} lacks {capability.name}")


def value(seed, num_tokens, layout=LAYOUT):
    """A whole request's rows, a function of the seed and each row's place: prefixes of equal seeds are equal."""
    assert num_tokens <= MAX_TOKENS
    return {
        component.name: np.stack(
            [
                _rows(f"{seed}/{component.name}/{layer}", component.row_bytes)[:num_tokens]
                for layer in component.layers
            ]
        )
        for component in layout.components
    }


@cache
def _rows(name, row_bytes):
    return np.random.default_rng(hash_of(name)).integers(0, 256, (MAX_TOKENS, row_bytes), np.uint8)


def hash_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


def chain_hashes(seed, count):
    return [hashlib.blake2b(f"{seed}/{i}".encode(), digest_size=16).digest() for i in range(count)]


def empty_like(rows):
    return {name: np.zeros_like(array) for name, array in rows.items()}


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def slots_of(*slots):
    return np.array(slots, np.int64)


def tokens_of(*rows):
    return np.array(rows, np.int32)


def write(store, slot, rows, first, last, start=None):
    """Append tokens first .. last of a value to a request, all regions, at `start` (default: first)."""
    at = np.array([first if start is None else start], np.int32)
    for component in store.layout.components:
        for index, layer in enumerate(component.layers):
            part = np.ascontiguousarray(rows[component.name][index : index + 1, first:last])
            store.append(slots_of(slot), layer, at, part, component=component.name)


def read(store, slot, num_tokens):
    """A whole request by its slot."""
    rows = empty_like(value("", num_tokens, store.layout))
    for name, array in rows.items():
        store.fetch(slot, name, 0, array)
    return rows


def publish_value(store, key, seed, num_tokens, **reserve):
    """Reserve, write what is not shared, publish; returns (descriptor, reservation)."""
    reservation = store.reserve(key, num_tokens, **reserve)
    write(store, reservation.slot, value(seed, num_tokens), reservation.shared_tokens, num_tokens)
    return store.publish(key), reservation


def raw_row(raw, descriptor, component, layer, token, layout=LAYOUT, num_blocks=NUM_BLOCKS):
    """One row by arithmetic of its own: layer first, 64 rows a block, appended tokens on a fresh block."""
    offset = 4096
    for name, region_layer in layout.regions:
        row_bytes = layout.component(name).row_bytes
        if (name, region_layer) == (component, layer):
            break
        offset += num_blocks * 64 * row_bytes
    prompt_blocks = -(-descriptor.prompt_tokens // 64)
    if token < descriptor.prompt_tokens:
        block, row = descriptor.blocks[token // 64], token % 64
    else:
        past = token - descriptor.prompt_tokens
        block, row = descriptor.blocks[prompt_blocks + past // 64], past % 64
    at = offset + (block * 64 + row) * row_bytes
    return raw[at : at + row_bytes]


def check_raw(raw, descriptor, rows):
    """Every row of a request lies on the raw medium where the layout says."""
    for component in LAYOUT.components:
        for index, layer in enumerate(component.layers):
            for token in range(descriptor.num_tokens):
                found = raw_row(raw, descriptor, component.name, layer, token)
                assert found == rows[component.name][index, token].tobytes(), (component, token)


@dataclass
class Child:
    """A spawned process and the pipe to it."""

    process: multiprocessing.Process
    pipe: object

    def get(self, seconds=60):
        assert self.pipe.poll(seconds), "the child said nothing"
        return self.pipe.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


@contextmanager
def child(function, *args):
    """Run function(pipe, *args) in a spawned process; it is killed when the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
