"""A store against a dict: any order of calls, two stores on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from contract_base import (
    BLOCK,
    DEVICE_BYTES,
    LAYOUT,
    NUM_BLOCKS,
    Place,
    chain_hashes,
    empty_like,
    read,
    same,
    value,
    write,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emu import StoreOptions
from emu.errors import KeyExists, StoreFull, UserError

KEYS = st.sampled_from("abcdef")
SEEDS = st.sampled_from(["p", "q"])


class Model:
    """One request as it should be: its seed, its prompt, what is written and what is published."""

    def __init__(self, seed, prompt, reserved, written):
        self.seed, self.prompt, self.reserved = seed, prompt, reserved
        self.written, self.published = written, None


class StoreMachine(RuleBasedStateMachine):
    """`writer` reserves and appends, `reader` attaches. Keys are held by the writer until they are deleted."""

    @initialize()
    def open(self):
        self.folder = tempfile.TemporaryDirectory(prefix="emu-test-", dir=shm())
        place = Place(f"dram://{self.folder.name}/dram0", StoreOptions(capacity_bytes=DEVICE_BYTES))
        self.writer, self.reader = place.open(), place.open()
        self.live: dict[str, Model] = {}
        self.slots: dict[str, int] = {}
        self.attached: list[tuple[int, Model, int]] = []

    @rule(key=KEYS, seed=SEEDS, prompt=st.integers(0, 3 * BLOCK), more=st.integers(0, BLOCK))
    def reserve(self, key, seed, prompt, more):
        hashes = chain_hashes(seed, prompt // BLOCK)
        used = self.writer.stats().used_bytes
        try:
            got = self.writer.reserve(key, prompt, block_hashes=hashes, append_tokens=more)
        except KeyExists:
            assert key in self.live
        except StoreFull:
            assert key not in self.live
            assert self.writer.stats().used_bytes == used
        else:
            assert key not in self.live
            assert got.shared_tokens % BLOCK == 0
            self.live[key] = Model(seed, prompt, prompt + more, got.shared_tokens)
            self.slots[key] = got.slot

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 100))
    def append(self, data, count):
        key = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[key]
        count = min(count, model.reserved - model.written)
        rows = value(model.seed, model.written + count)
        write(self.writer, self.slots[key], rows, model.written, model.written + count)
        model.written += count

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, BLOCK))
    def append_too_much(self, data, count):
        key = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[key]
        rows = value(model.seed, model.reserved + count)
        with pytest.raises(UserError):
            write(self.writer, self.slots[key], rows, model.written, model.reserved + count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish_and_attach(self, data):
        key = data.draw(st.sampled_from(sorted(self.live)))
        model = self.live[key]
        descriptor = self.writer.publish(key)
        model.published = model.written
        assert (descriptor.num_tokens, descriptor.prompt_tokens) == (model.written, model.prompt)
        self.attached.append((self.reader.attach(descriptor), model, model.written))

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data):
        slot, _, _ = self.attached.pop(
            data.draw(st.integers(0, len(self.attached) - 1), label="attached")
        )
        self.reader.detach(slot)

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete(self, keys):
        assert self.writer.delete(keys) == len(set(keys) & self.live.keys())
        for key in set(keys) & self.live.keys():
            del self.live[key], self.slots[key]

    @rule(key=KEYS, seed=SEEDS, tokens=st.integers(0, 2 * BLOCK))
    def put(self, key, seed, tokens):
        try:
            self.writer.put([key], [value(seed, tokens)])
        except KeyExists:
            assert key in self.live
        except StoreFull:
            assert key not in self.live
        else:
            self.live[key] = Model(seed, tokens, tokens, tokens)
            self.live[key].published = tokens
            self.slots[key] = int(self.writer.slots([key])[0])

    @invariant()
    def everything_is_as_modelled(self):
        if not hasattr(self, "live"):
            return
        keys = sorted(self.live)
        published = [key for key in keys if self.live[key].published is not None]
        assert self.reader.exists(list("abcdef")).tolist() == [k in published for k in "abcdef"]
        out = [empty_like(value("", self.live[key].published)) for key in published]
        assert self.reader.get(published, out).all()
        for key, rows in zip(published, out, strict=True):
            assert same(rows, value(self.live[key].seed, self.live[key].published))
        for key in keys:
            model = self.live[key]
            assert self.writer.length(self.slots[key]) == model.written
            rows = read(self.writer, self.slots[key], model.written)
            assert same(rows, value(model.seed, model.written))
        for slot, model, length in self.attached:
            assert same(read(self.reader, slot, length), value(model.seed, length))

    @invariant()
    def used_blocks_are_within_what_is_held(self):
        if not hasattr(self, "live"):
            return
        used = self.writer.stats().used_bytes // LAYOUT.block_bytes
        models = {id(m): m for m in [*self.live.values(), *(m for _, m, _ in self.attached)]}
        blocks = [
            LAYOUT.blocks_for(m.prompt) + LAYOUT.blocks_for(m.reserved - m.prompt)
            for m in models.values()
        ]
        assert max(blocks, default=0) <= used <= min(sum(blocks), NUM_BLOCKS)
        assert used > 0 or not np.any(blocks)

    def teardown(self):
        if hasattr(self, "live"):
            self.writer.close()
            self.reader.stats()
            self.reader.close()
            self.folder.cleanup()


def shm():
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


TestStateMachine = StoreMachine.TestCase
TestStateMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
