"""Contract: publish, attach, append right, shared prefixes, delete under a reader; several stores and processes."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from contract_base import (
    BLOCK,
    DEVICE_BYTES,
    LAYOUT,
    NUM_BLOCKS,
    ContractBase,
    chain_hashes,
    check_raw,
    child,
    need,
    publish_value,
    read,
    same,
    slots_of,
    tokens_of,
    value,
    write,
)

from emu import Capability, Component, Descriptor, KVLayout, StoreOptions, open_store
from emu.errors import (
    KeyExists,
    KeyMissing,
    LayoutMismatch,
    SlotStale,
    StaleDescriptor,
    StoreError,
    StoreFull,
    UserError,
)


def attach_and_append(pipe, place, wire, seed, first, last):
    """Read a request by its descriptor, append tokens first .. last, publish; waits before it closes."""
    with place.open() as store:
        slot = store.attach(Descriptor.from_bytes(wire))
        intact = same(read(store, slot, first), value(seed, first))
        write(store, slot, value(seed, last), first, last)
        pipe.send((intact, store.length(slot), store.publish("a").to_bytes()))
        pipe.recv()


def attach_and_check(pipe, place, wire, seed):
    """Hold a request and say, whenever asked, whether its bytes are intact."""
    descriptor = Descriptor.from_bytes(wire)
    with place.open() as store:
        slot = store.attach(descriptor)
        want = value(seed, descriptor.num_tokens)
        pipe.send("attached")
        while pipe.recv() == "check":
            pipe.send(same(read(store, slot, descriptor.num_tokens), want))
        store.detach(slot)
        pipe.send("detached")
        pipe.recv()


class SharingContract(ContractBase):
    @pytest.fixture
    def shared(self, make_store):
        """A store on a device that others can open too."""
        store = make_store()
        need(store, Capability.SHARED)
        return store

    def test_another_process_reads_and_appends(self, shared, place, raw):
        descriptor, reservation = publish_value(shared, "a", "a", 70, append_tokens=70)
        with child(attach_and_append, place, descriptor.to_bytes(), "a", 70, 140) as other:
            intact, length, wire = other.get()
            assert (intact, length) == (True, 140)
            grown = Descriptor.from_bytes(wire)
            assert grown == replace(descriptor, num_tokens=140)
            check_raw(raw(shared), grown, value("a", 140))
            assert shared.length(reservation.slot) == 70  # a reader attaches again to see more
            again = shared.attach(grown)
            assert same(read(shared, again, 140), value("a", 140))
            other.pipe.send("end")

    def test_attach_works_after_the_publisher_closed(self, shared, make_store):
        descriptor, _ = publish_value(shared, "a", "a", 100)
        shared.close()
        store = make_store()
        assert same(read(store, store.attach(descriptor), 100), value("a", 100))
        assert store.publish("a") == descriptor

    def test_a_reader_keeps_its_bytes_while_others_churn(self, shared, place):
        descriptor, _ = publish_value(shared, "a", "a", 130)
        used = shared.stats().used_bytes
        with child(attach_and_check, place, descriptor.to_bytes(), "a") as reader:
            reader.get()
            assert shared.delete(["a"]) == 1
            assert not shared.exists(["a"])[0]
            assert shared.stats().used_bytes == used
            with pytest.raises(StaleDescriptor):
                shared.attach(descriptor)
            for i in range(40):  # more than the device holds: everything but the reader's is reused
                shared.put([f"x{i}"], [value(i, 3 * BLOCK)])
                shared.detach(int(shared.slots([f"x{i}"])[0]))
            shared.put(["a"], [value("other", 64)])
            reader.pipe.send("check")
            assert reader.get() is True
            reader.pipe.send("end")
            reader.get()
            shared.delete([f"x{i}" for i in range(40)] + ["a"])
            assert shared.stats().used_bytes == 0
            reader.pipe.send("end")

    def test_space_returns_with_the_last_reader(self, store):
        descriptor, reservation = publish_value(store, "a", "a", 130)
        readers = [store.attach(descriptor), store.attach(descriptor)]
        store.detach(reservation.slot)
        with pytest.raises(SlotStale):
            store.length(reservation.slot)
        assert same(read(store, readers[1], 130), value("a", 130))
        store.delete(["a"])  # this store's own slots go with the key
        assert store.stats().used_bytes == 0
        for slot in readers:
            with pytest.raises(SlotStale):
                store.length(slot)

    def test_a_prefix_is_stored_once_and_outlives_its_first_owner(self, store, raw):
        hashes = chain_hashes("p", 3)
        first, _ = publish_value(store, "a", "p", 200, block_hashes=hashes)
        assert store.stats().used_bytes == 4 * LAYOUT.block_bytes
        second, reservation = publish_value(store, "b", "p", 140, block_hashes=hashes[:2])
        assert reservation.shared_tokens == 128
        assert second.blocks[:2] == first.blocks[:2]
        assert second.blocks[2] not in first.blocks
        assert store.stats().used_bytes == 5 * LAYOUT.block_bytes
        store.delete(["a"])
        assert store.stats().used_bytes == 3 * LAYOUT.block_bytes
        check_raw(raw(store), second, value("p", 140))
        assert store.reserve("c", 192, block_hashes=hashes).shared_tokens == 128
        store.delete(["b", "c"])
        assert store.stats().used_bytes == 0
        assert store.reserve("d", 192, block_hashes=hashes).shared_tokens == 0

    def test_only_a_leading_run_of_published_full_blocks_is_shared(self, store):
        hashes, other = chain_hashes("p", 3), chain_hashes("q", 1)
        slot = store.reserve("a", 192, block_hashes=hashes).slot
        twin = store.reserve("b", 192, block_hashes=hashes)
        assert twin.shared_tokens == 0
        write(store, slot, value("p", 192), 0, 100)
        store.publish("a")  # its second and third block are not full
        for key, wanted, tokens in (("c", hashes, 64), ("d", [hashes[0], *other], 64)):
            assert store.reserve(key, 192, block_hashes=wanted).shared_tokens == tokens
            store.delete([key])
        write(store, slot, value("p", 192), 100, 192)
        store.publish("a")
        for key, wanted, tokens in (("e", hashes, 192), ("f", [*other, *hashes[1:]], 0)):
            assert store.reserve(key, 192, block_hashes=wanted).shared_tokens == tokens
            store.delete([key])
        write(
            store, twin.slot, value("p", 192), 0, 192
        )  # written meanwhile, so it has its own blocks
        assert not set(store.publish("b").blocks) & set(store.publish("a").blocks)
        store.delete(["a"])
        assert same(read(store, twin.slot, 192), value("p", 192))

    def test_shared_and_published_tokens_cannot_be_written(self, store, raw):
        publish_value(store, "a", "p", 64, block_hashes=chain_hashes("p", 1))
        reservation = store.reserve("b", 70, block_hashes=chain_hashes("p", 1), append_tokens=1)
        assert store.length(reservation.slot) == 64
        before = raw(store)
        for start in (0, 63):
            with pytest.raises(ValueError, match="shared"):
                write(store, reservation.slot, value("x", 70), 0, 1, start=start)
        write(store, reservation.slot, value("p", 70), 64, 70)
        store.publish("b")
        with pytest.raises(ValueError, match="published"):
            write(store, reservation.slot, value("x", 70), 0, 1, start=69)
        assert raw(store) != before
        write(store, reservation.slot, value("p", 71), 70, 71)

    def test_one_attacher_at_a_time_appends(self, shared, make_store):
        descriptor, _ = publish_value(shared, "a", "a", 10, append_tokens=100)
        one, two = make_store(), make_store()
        first, second = one.attach(descriptor), two.attach(descriptor)
        write(one, first, value("a", 12), 10, 11)
        with pytest.raises(UserError, match="another attacher"):
            write(two, second, value("b", 12), 10, 11)
        with pytest.raises(ValueError, match="gap"):
            write(two, second, value("b", 12), 11, 12)
        one.publish("a")
        write(one, first, value("a", 12), 11, 12)
        one.publish("a")
        assert two.publish("a").num_tokens == 12  # one that does not append only asks
        one.detach(first)
        with pytest.raises(UserError, match="grown to 12"):
            write(two, second, value("b", 12), 10, 11)
        again = two.attach(descriptor)
        write(two, again, value("a", 13), 12, 13)
        assert two.publish("a").num_tokens == 13
        assert same(read(shared, shared.attach(descriptor), 13), value("a", 13))

    def test_a_refused_append_does_not_take_the_right(self, shared, make_store):
        descriptor, _ = publish_value(shared, "a", "a", 10, append_tokens=64)
        one, two = make_store(), make_store()
        with pytest.raises(ValueError, match="reserved"):
            write(one, one.attach(descriptor), value("a", 100), 10, 100)
        write(two, two.attach(descriptor), value("a", 11), 10, 11)

    def test_every_store_sees_the_same_keys(self, shared, make_store):
        other = make_store()
        reservation = shared.reserve("a", 4)
        assert not other.exists(["a"])[0]
        assert other.delete(["a"]) == 0
        with pytest.raises(KeyExists):
            other.put(["a"], [value("a", 4)])
        with pytest.raises(KeyMissing):
            other.publish("a")
        with pytest.raises(KeyMissing):
            other.slots(["a"])
        write(shared, reservation.slot, value("a", 4), 0, 4)
        descriptor = shared.publish("a")
        assert other.exists(["a"])[0]
        assert other.publish("a") == descriptor
        assert same(read(other, int(other.slots(["a"])[0]), 4), value("a", 4))
        assert other.delete(["a"]) == 1
        with pytest.raises(KeyMissing):
            shared.publish("a")
        assert same(read(shared, reservation.slot, 4), value("a", 4))

    def test_an_abandoned_reservation_leaves_nothing(self, shared, make_store):
        other = make_store()
        other.reserve("a", 100)
        other.detach(other.reserve("b", 100).slot)
        assert shared.stats().used_bytes == 2 * LAYOUT.block_bytes
        other.close()
        assert shared.stats().used_bytes == 0
        shared.put(["a"], [value("a", 1)])

    def test_what_another_store_holds_is_not_evicted(self, shared, make_store):
        descriptor, _ = publish_value(shared, "a", "a", 10 * BLOCK // 3)
        other = make_store()
        shared.detach(int(shared.slots(["a"])[0]))
        slot = other.attach(descriptor)
        with pytest.raises(StoreFull):
            shared.reserve("b", 13 * BLOCK)
        other.detach(slot)
        shared.reserve("b", 13 * BLOCK)
        assert not shared.exists(["a"])[0]

    def test_descriptors_that_name_nothing_here(self, store):
        descriptor, _ = publish_value(store, "a", "a", 70)
        for stale in (
            replace(descriptor, device=bytes(16)),
            replace(descriptor, generation=descriptor.generation + 1),
            replace(descriptor, key="b"),
            replace(descriptor, blocks=descriptor.blocks[::-1]),
        ):
            with pytest.raises(StaleDescriptor) as refused:
                store.attach(stale)
            elsewhere = stale.device != descriptor.device
            assert ("is gone" in str(refused.value)) is not elsewhere
        with pytest.raises(LayoutMismatch) as mismatch:
            store.attach(replace(descriptor, layout=b"x" * 16))
        assert mismatch.value.found == (b"x" * 16).hex()
        store.delete(["a"])
        publish_value(store, "a", "a", 70)  # the same key on the same blocks is another request
        with pytest.raises(StaleDescriptor) as stale:
            store.attach(descriptor)
        assert (stale.value.key, stale.value.generation) == ("a", descriptor.generation)

    def test_a_descriptor_of_another_device_says_which_it_belongs_to(self, store):
        here, _ = publish_value(store, "a", "a", 70)
        options = StoreOptions(capacity_bytes=DEVICE_BYTES)
        with open_store("dram://", LAYOUT, options) as elsewhere:
            there, _ = publish_value(elsewhere, "a", "other", 70)
            assert replace(there, device=here.device) == here  # nothing else tells them apart
            with pytest.raises(StaleDescriptor) as stale:
                store.attach(there)
        error = stale.value
        assert (error.belongs_to, error.uuid) == (there.device.hex(), here.device.hex())
        assert f"belongs to device {error.belongs_to}, this is {error.uuid}" in str(error)
        assert error.device == store.device
        assert error.device in str(error)
        assert "gone" not in str(error)

    def test_another_layout_waits_for_the_holders(self, shared, make_store, place):
        other = KVLayout((Component("kv", 1152, (0,)),))
        publish_value(shared, "a", "a", 4)
        with pytest.raises(LayoutMismatch) as mismatch:
            replace(place, layout=other).open()
        assert str(os.getpid()) in str(mismatch.value)
        assert mismatch.value.found == LAYOUT.fingerprint().hex()
        assert shared.exists(["a"])[0]
        shared.detach(int(shared.slots(["a"])[0]))
        with replace(place, layout=other).open() as store:
            assert not store.exists(["a"])[0]
            with pytest.raises(StoreError, match="anew"):
                shared.exists(["a"])

    def test_a_fork_is_told_to_open_its_own(self, store):
        store.put(["a"], [value("a", 4)])
        slots = store.slots(["a"])
        out = store.buffer(656).reshape(1, 1, 656)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.gather(slots, 0, tokens_of([0]), out)
            except StoreError as error:
                status = 0 if "fork" in str(error) else 2
                store.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.gather(slots_of(int(slots[0])), 0, tokens_of([0]), out) == 1
        assert np.array_equal(out[0, 0], value("a", 4)["kv"][0, 0])
        with pytest.raises(StoreFull):  # the parent's lease is still there
            store.reserve("b", NUM_BLOCKS * BLOCK)
