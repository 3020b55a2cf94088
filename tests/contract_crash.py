"""Contract: kill -9 of any user at any moment; space comes back and published rows are intact."""

from __future__ import annotations

import os
import resource
import time

import pytest
from contract_base import (
    LAYOUT,
    NUM_BLOCKS,
    ContractBase,
    check_raw,
    child,
    need,
    publish_value,
    read,
    same,
    value,
    write,
)

from emu import Capability, Descriptor
from emu.errors import EmuError, StoreFull, UserError


def hold(pipe, place, wire):
    """Hold a published request, a published one of its own, and one that is only reserved; then wait."""
    store = place.open()
    slot = store.attach(Descriptor.from_bytes(wire))
    write(store, slot, value("a", 80), 70, 80)
    publish_value(store, "own", "own", 130)
    store.reserve("half", 64 * 8)
    pipe.send("holding")
    pipe.recv()


def churn(pipe, place, name):
    """Reserve, append, publish, delete, for ever; every published request says so on the pipe."""
    store = place.open()
    pipe.send("started")
    for i in range(1 << 30):
        key = f"{name}{i}"
        try:
            publish_value(store, key, i % 7, 100)
        except StoreFull:
            continue
        slot = store.attach(store.publish(key))
        assert same(read(store, slot, 100), value(i % 7, 100))
        if i % 3 == 0:
            store.delete([key])
        else:
            for held in store.slots([key]):
                store.detach(int(held))


def crowd_out(pipe, place):
    """Without a free file descriptor, ask for the figures and put until nothing fits any more."""
    store = place.open()
    rows = value("mine", 64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    while len(taken) < 64:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    kept = 0
    try:
        store.stats()
        for kept in range(NUM_BLOCKS + 1):
            store.put([f"mine{kept}"], [rows])
    except EmuError:
        pass
    pipe.send((len(taken), kept))
    pipe.recv()


class CrashContract(ContractBase):
    def test_what_a_killed_process_held_comes_back(self, make_store, place):
        store = make_store()
        need(store, Capability.SHARED)
        descriptor, _ = publish_value(store, "a", "a", 70, append_tokens=64)
        with child(hold, place, descriptor.to_bytes()) as other:
            other.get()
            assert store.stats().used_bytes == (3 + 3 + 8) * LAYOUT.block_bytes
            with pytest.raises(StoreFull):
                store.reserve("b", 3 * 64)
            with pytest.raises(UserError, match="another attacher"):
                write(store, store.attach(descriptor), value("a", 71), 70, 71)
            other.kill()
            assert store.stats().used_bytes == (3 + 3) * LAYOUT.block_bytes
            assert store.exists(["a", "own", "half"]).tolist() == [True, True, False]
            write(store, store.attach(descriptor), value("a", 71), 70, 71)
            assert store.publish("a").num_tokens == 71
            store.reserve("half", 13 * 64)  # needs what was published but is held by nobody now
            assert store.exists(["a", "own"]).tolist() == [True, False]

    def test_a_killed_process_does_not_block_its_key(self, make_store, place):
        store = make_store()
        need(store, Capability.SHARED)
        descriptor, _ = publish_value(store, "a", "a", 70, append_tokens=64)
        with child(hold, place, descriptor.to_bytes()) as other:
            other.get()
            other.kill()
            store.reserve("half", 64)

    def test_a_process_out_of_file_descriptors_takes_nothing_from_the_living(
        self, make_store, place
    ):
        store = make_store()
        need(store, Capability.SHARED)
        store.put(["a"], [value("a", 200)])
        slot = int(store.slots(["a"])[0])
        with child(crowd_out, place) as other:
            taken, kept = other.get()
            assert 0 < taken < 64
            assert kept <= NUM_BLOCKS - 4
            assert same(read(store, slot, 200), value("a", 200))
            assert store.stats().used_bytes == (4 + kept) * LAYOUT.block_bytes

    @pytest.mark.slow
    def test_kills_in_the_middle_leave_it_right(self, make_store, place, raw):
        store = make_store()
        need(store, Capability.SHARED)
        descriptor, _ = publish_value(store, "a", "a", 130)
        found = 0
        for round_ in range(4):
            with (
                child(churn, place, f"r{round_}x") as one,
                child(churn, place, f"r{round_}y") as two,
            ):
                one.get()
                two.get()
                time.sleep(0.05 + 0.13 * round_)  # some moment of the loop, another each round
                assert one.process.is_alive()
                assert two.process.is_alive()
                one.kill()
                two.kill()
            found += self.check_whole(store, raw, round_)
        assert found > 0
        check_raw(raw(store), descriptor, value("a", 130))
        store.delete(["a"])
        store.reserve("all", NUM_BLOCKS * 64)

    def check_whole(self, store, raw, round_):
        """Every request that is published has exactly its bytes; how many there are."""
        assert store.stats().used_bytes <= NUM_BLOCKS * LAYOUT.block_bytes
        device, found = raw(store), 0
        for name in (f"r{round_}x", f"r{round_}y"):
            keys = [f"{name}{i}" for i in range(3000)]
            for i in store.exists(keys).nonzero()[0]:
                descriptor = store.publish(keys[i])
                assert descriptor.num_tokens == 100
                check_raw(device, descriptor, value(int(i) % 7, 100))
                found += 1
        return found
