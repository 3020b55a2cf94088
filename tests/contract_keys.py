"""Contract: keys, slots, room and eviction, and the counters of it all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from contract_base import (
    BLOCK,
    DEVICE_BYTES,
    LAYOUT,
    NUM_BLOCKS,
    ContractBase,
    empty_like,
    need,
    publish_value,
    same,
    slots_of,
    tokens_of,
    value,
    write,
)

from emu import Capability, Descriptor
from emu.errors import (
    HostError,
    KeyExists,
    KeyMissing,
    SlotStale,
    StaleDescriptor,
    StoreClosed,
    StoreFull,
    TokenMissing,
    UserError,
)


class RecordingTiming:
    def __init__(self):
        self.begun, self.ended = [], []

    def begin(self, operation, nbytes, rows):
        self.begun.append((operation, nbytes, rows))
        return len(self.begun) - 1

    def end(self, handle):
        self.ended.append(handle)
        return 1000, 10


class KeysContract(ContractBase):
    def test_masks_follow_the_order_of_keys_and_duplicates(self, store):
        store.put(["a", "b"], [value("a", 1), value("b", 1)])
        keys = ["x", "b", "a", "b", "y"]
        assert store.exists(keys).tolist() == [False, True, True, True, False]
        out = [empty_like(value("", 1)) for _ in keys]
        assert store.get(keys, out).tolist() == [False, True, True, True, False]
        assert same(out[1], out[3])
        assert same(out[1], value("b", 1))
        slots = store.slots(["b", "a", "b"])
        assert slots.dtype == np.int64
        assert slots[0] == slots[2] != slots[1]
        assert store.delete(["b", "x", "b"]) == 1
        assert store.exists(["a", "b"]).tolist() == [True, False]

    def test_a_key_twice_in_one_put_is_refused_whole(self, store):
        with pytest.raises(KeyExists):
            store.put(["a", "b", "a"], [value("a", 1)] * 3)
        assert not store.exists(["a", "b"]).any()
        assert store.stats().used_bytes == 0

    @pytest.mark.parametrize("key", ["", "\ud800", "x" * 1025, 7])
    def test_what_cannot_be_a_key_is_refused(self, store, key):
        with pytest.raises(UserError, match="key"):
            store.reserve(key, 1)
        with pytest.raises(UserError, match="key"):
            store.exists([key])

    def test_reserve_refuses_impossible_numbers(self, store):
        for arguments in (
            {"num_tokens": -1},
            {"num_tokens": 1, "append_tokens": -1},
            {"num_tokens": 2**31},
            {"num_tokens": 64, "block_hashes": [b"x" * 16] * 2},
            {"num_tokens": 64, "block_hashes": [b"x" * 15]},
        ):
            with pytest.raises(UserError):
                store.reserve("a", **arguments)
        assert store.stats().used_bytes == 0

    def test_a_slot_is_stale_after_delete_even_when_its_place_is_taken(self, store):
        store.put(["a"], [value("a", 4)])
        old = store.slots(["a"])
        store.delete(["a"])
        out = store.buffer(656).reshape(1, 1, 656)
        for _ in range(2):
            with pytest.raises(SlotStale) as stale:
                store.gather(old, 0, tokens_of([0]), out)
            assert (stale.value.slot, stale.value.device) == (old[0], store.device)
            with pytest.raises(SlotStale):
                store.append(old, 0, tokens_of(4)[0:1], np.zeros((1, 1, 656), np.uint8))
            for call in (store.length, store.detach):
                with pytest.raises(SlotStale):
                    call(int(old[0]))
            store.put(["b"], [value("b", 4)]) if not store.exists(["b"])[0] else None

    def test_slots_of_a_missing_key(self, store):
        store.put(["a"], [value("a", 1)])
        with pytest.raises(KeyMissing) as missing:
            store.slots(["a", "nobody"])
        assert (missing.value.key, missing.value.device) == ("nobody", store.device)
        with pytest.raises(KeyMissing):
            store.publish("nobody")

    def test_a_reserved_request_is_invisible_until_published(self, store):
        slot = store.reserve("a", 1).slot
        assert not store.exists(["a"])[0]
        assert not store.get(["a"], [empty_like(value("a", 0))])[0]
        with pytest.raises(KeyExists) as taken:
            store.reserve("a", 1)
        assert (taken.value.key, taken.value.device) == ("a", store.device)
        write(store, slot, value("a", 1), 0, 1)
        store.publish("a")
        assert store.exists(["a"])[0]

    def test_full_changes_nothing(self, store, raw):
        store.put(["a"], [value("a", 64)])
        store.reserve("b", 13 * BLOCK)
        before, used = raw(store), store.stats().used_bytes
        with pytest.raises(StoreFull) as full:
            store.reserve("c", 2 * BLOCK, append_tokens=1)
        assert full.value.needed_bytes == 3 * LAYOUT.block_bytes
        assert full.value.free_bytes == 2 * LAYOUT.block_bytes
        assert full.value.capacity_bytes == NUM_BLOCKS * LAYOUT.block_bytes
        with pytest.raises(StoreFull):
            store.put(["c", "d", "e"], [value("c", 64)] * 3)
        assert store.stats().used_bytes == used
        assert raw(store) == before
        assert store.exists(["a", "c", "d", "e"]).tolist() == [True, False, False, False]
        store.put(["c", "d"], [value("c", 64)] * 2)

    def test_only_what_nobody_holds_is_evicted_oldest_first(self, store):
        for key in "abcd":
            store.put([key], [value(key, 4 * BLOCK)])
        for key in "bcd":
            store.detach(int(store.slots([key])[0]))
        out = empty_like(value("b", 4 * BLOCK))
        assert store.get(["b"], [out])[0]  # used last of the three
        store.put(["e"], [value("e", 4 * BLOCK)])
        assert store.exists(list("abcde")).tolist() == [True, True, False, True, True]
        store.put(["f"], [value("f", 4 * BLOCK)])
        assert store.exists(list("abcdef")).tolist() == [True, True, False, False, True, True]
        assert store.get(["a", "b"], [out, out]).all()
        with pytest.raises(StoreFull):
            store.reserve("g", 5 * BLOCK)
        assert store.exists(list("abef")).all()

    def test_stats_add_up(self, make_store):
        timing = RecordingTiming()
        store = make_store(timing=timing)
        assert store.stats().capacity_bytes == NUM_BLOCKS * LAYOUT.block_bytes
        rows = value("a", 70)
        store.put(["a"], [rows])
        stats = store.stats()
        assert stats.rows_written == 70 * 4
        assert (
            stats.bytes_written == 70 * LAYOUT.token_bytes == sum(a.nbytes for a in rows.values())
        )
        assert stats.used_bytes == 2 * LAYOUT.block_bytes
        store.get(["a", "b"], [rows, rows])
        out = store.buffer(3 * 656).reshape(1, 3, 656)
        store.gather(store.slots(["a"]), 0, tokens_of([5, -1, 6]), out)
        stats = store.stats()
        assert stats.rows_read == 70 * 4 + 2
        assert stats.bytes_read == 70 * LAYOUT.token_bytes + 2 * 656
        assert stats.charged_ns == 1000 * len(timing.begun)
        assert stats.waited_ns == 10 * len(timing.begun)
        store.reset_stats()
        stats = store.stats()
        assert (stats.rows_read, stats.rows_written, stats.charged_ns) == (0, 0, 0)
        assert stats.used_bytes == 2 * LAYOUT.block_bytes

    def test_timing_is_told_the_bytes_that_move(self, make_store):
        timing = RecordingTiming()
        store = make_store(timing=timing)
        slot = store.reserve("a", 4).slot
        zero = np.zeros(1, np.int32)
        store.append(slots_of(slot), 0, zero, value("a", 4)["kv"][:1])
        store.append(slots_of(slot), 1, zero, value("a", 4)["index"][:1], component="index")
        out = store.buffer(3 * 656).reshape(1, 3, 656)
        store.gather(slots_of(slot), 0, tokens_of([1, -1, 3]), out)
        store.fetch(slot, "index", 1, np.zeros((1, 3, 132), np.uint8))
        assert timing.begun == [
            ("write", 4 * 656, 4),
            ("write", 4 * 132, 4),
            ("read", 2 * 656, 2),
            ("read", 3 * 132, 3),
        ]
        with pytest.raises(TokenMissing):
            store.gather(slots_of(slot), 0, tokens_of([1, -1, 4]), out)
        assert sorted(timing.ended) == list(range(len(timing.begun)))

    def test_buffer_is_line_aligned_and_the_callers_own(self, store):
        first, second = store.buffer(100), store.buffer(100)
        for buffer in (first, second):
            assert (buffer.dtype, buffer.shape) == (np.uint8, (100,))
            assert buffer.ctypes.data % 64 == 0
        first[:] = 1
        second[:] = 2
        assert (first == 1).all()
        assert store.buffer(0).size == 0
        with pytest.raises(UserError):
            store.buffer(-1)

    def test_close_twice_then_every_call_says_closed(self, store):
        descriptor, reservation = publish_value(store, "a", "a", 4)
        out = np.zeros((1, 1, 656), np.uint8)
        store.close()
        store.close()
        for call in (
            lambda: store.buffer(1),
            lambda: store.reserve("b", 1),
            lambda: store.put(["b"], [value("b", 1)]),
            lambda: store.get(["a"], [value("a", 4)]),
            lambda: store.exists(["a"]),
            lambda: store.delete(["a"]),
            lambda: store.slots(["a"]),
            lambda: store.length(reservation.slot),
            lambda: store.gather(slots_of(reservation.slot), 0, tokens_of([0]), out),
            lambda: store.fetch(reservation.slot, "kv", 0, out),
            lambda: store.append(slots_of(reservation.slot), 0, np.zeros(1, np.int32), out),
            lambda: store.publish("a"),
            lambda: store.attach(descriptor),
            lambda: store.detach(reservation.slot),
            store.stats,
            store.reset_stats,
        ):
            with pytest.raises(StoreClosed):
                call()

    def test_a_device_is_as_large_as_it_was_made(self, store):
        need(store, Capability.LOAD_STORE)
        assert store._medium.size_bytes == DEVICE_BYTES

    def test_arguments_of_a_wrong_type_are_type_errors_of_ours(self, store):
        store.put(["a"], [value("a", 70)])
        slots = store.slots(["a"])
        slot = int(slots[0])
        tokens, out = np.zeros((1, 1), np.int32), np.zeros((1, 1, 656), np.uint8)
        whole = np.zeros((3, 1, 656), np.uint8)
        calls = [
            *(lambda bad=bad: store.attach(bad) for bad in (None, b"x", "x", 5)),
            *(lambda bad=bad: Descriptor.from_bytes(bad) for bad in (None, "x", 5, [1])),
            *(
                lambda bad=bad: store.reserve("b", 64, block_hashes=bad)
                for bad in (None, b"x" * 16, "x" * 16, ["x" * 16], [5], [[0] * 16], [None])
            ),
            *(lambda bad=bad: store.gather(slots, bad, tokens, out) for bad in ([], {}, slots)),
            *(
                lambda bad=bad: store.gather(slots, 0, tokens, out, component=bad)
                for bad in ([], {}, slots)
            ),
            *(lambda bad=bad: store.fetch(slot, "kv", bad, whole) for bad in (None, 1.5, "1", [1])),
            *(lambda bad=bad: store.fetch(bad, "kv", 0, whole) for bad in (None, 0.5, [0])),
            *(lambda bad=bad: store.length(bad) for bad in (None, 0.5, [1], np.arange(3))),
            *(lambda bad=bad: store.detach(bad) for bad in (None, 0.5, [1])),
            *(lambda bad=bad: store.put(["e"], [bad]) for bad in (None, 5, "kv", [1])),
            *(lambda bad=bad: store.put(["e"], bad) for bad in (None, 5)),
            *(lambda bad=bad: store.exists(bad) for bad in (None, 5)),
            *(lambda bad=bad: store.buffer(bad) for bad in (None, 1.5, "1", [1])),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(UserError) as refused:
                call()
            assert isinstance(refused.value, TypeError), (number, refused.value)
        assert store.exists(["a", "b", "e"]).tolist() == [True, False, False]

    @pytest.mark.parametrize("nbytes", [1 << 50, 1 << 80])
    def test_a_buffer_that_does_not_fit_says_so(self, store, nbytes):
        with pytest.raises(HostError, match="memory"):
            store.buffer(nbytes)

    @pytest.mark.parametrize("generation", [2**63, 2**64 - 1])
    def test_a_forged_generation_is_refused(self, store, generation):
        store.put(["a"], [value("a", 10)])
        forged = replace(store.publish("a"), generation=generation)
        with pytest.raises(StaleDescriptor):
            store.attach(forged)
        with pytest.raises(UserError, match="impossible"):
            Descriptor.from_bytes(forged.to_bytes())
