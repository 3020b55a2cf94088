"""The store contract over a memory node, and what only an rdma store can meet."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from contract import StoreContract
from contract_base import DEVICE_BYTES, LAYOUT, Place, read, same, slots_of, tokens_of, value
from memory_nodes import raw_node, start_node, wait_until

from emu import StoreOptions, open_store
from emu.errors import KeyMissing, MediumError, UserError

WIDTH = 656


@pytest.fixture
def node(tmp_path):
    with raw_node(tmp_path, DEVICE_BYTES) as node:
        yield node


class TestRdma(StoreContract):
    @pytest.fixture
    def place(self, node):
        return Place(f"rdma://{node.address}", StoreOptions())

    @pytest.fixture
    def raw(self, node):
        return lambda store: node.raw.tobytes()

    def test_work_requests_of_a_sparse_read_and_of_a_packed_one(self, store):
        rows = value("a", 256)
        store.put(["a"], [rows])
        out = store.buffer(100 * WIDTH).reshape(1, 100, WIDTH)
        tokens = tokens_of(range(0, 200, 2))
        for packed, requests, reads in ((False, 100, 16), (True, 1, 0)):
            out[:] = 0
            store.reset_stats()
            store.gather(store.slots(["a"]), 2, tokens, out, packed=packed)
            stats = store.stats()
            assert (stats.work_requests, stats.max_outstanding_reads) == (requests, reads)
            assert (stats.rows_read, stats.bytes_read) == (100, 100 * WIDTH)
            assert np.array_equal(out[0], rows["kv"][2, tokens[0]])

    def test_a_killed_node_is_an_error_at_once_and_close_still_works(self, store, node):
        store.put(["a"], [value("a", 64)])
        slot = store.slots(["a"])[0]
        out = store.buffer(WIDTH).reshape(1, 1, WIDTH)
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(20)
        calls = (
            lambda: store.gather(slots_of(slot), 0, tokens_of([3]), out),
            lambda: store.gather(slots_of(slot), 0, tokens_of([3]), out, packed=True),
            lambda: store.put(["b"], [value("b", 64)]),
            lambda: store.reserve("c", 64),
            lambda: store.buffer(64),
        )
        for call in calls:
            with pytest.raises(MediumError) as fault:
                call()
            assert fault.value.status in {"IBV_WC_RETRY_EXC_ERR", "IBV_WC_WR_FLUSH_ERR"}
            assert "open the store again" in fault.value.remedy or "has ended" in fault.value.remedy
        store.close()

    @pytest.mark.parametrize("stop", [True, False])
    def test_a_silent_node_is_an_error_after_the_store_s_timeout(self, make_store, node, stop):
        """Stopped, or running with all its threads asleep: the error says which process to look at, and how it is."""
        pid = node.process.pid
        store = make_store(timeout_s=0.5)
        store.put(["a"], [value("a", 64)])
        slots = store.slots(["a"])
        out = store.buffer(WIDTH).reshape(1, 1, WIDTH)
        os.kill(pid, signal.SIGSTOP)
        try:
            if not stop:
                store._medium._connection._node_pid = os.getpid()  # one that runs
            began = time.monotonic()
            with pytest.raises(MediumError) as fault:
                store.gather(slots, 0, tokens_of([3]), out)
            assert time.monotonic() - began >= 0.5
        finally:
            os.kill(pid, signal.SIGCONT)
        said = f"process {pid} is stopped: `kill -CONT {pid}`" if stop else "did nothing for 0.5 s"
        assert said in str(fault.value)
        store.close()
        again = make_store()
        assert same(read(again, again.slots(["a"])[0], 64), value("a", 64))

    def test_two_names_of_a_node_are_one_pool_or_refused(self, make_store, node, tmp_path):
        store = make_store()
        store.put(["a"], [value("a", 100)])
        linked, hard = tmp_path / "linked.sock", tmp_path / "hard.sock"
        linked.symlink_to(node.address)
        os.link(node.address, hard)
        with Place(f"rdma://{linked}", StoreOptions()).open() as again:
            again.put(["b"], [value("b", 100)])
        assert store.exists(["a", "b"]).tolist() == [True, True]
        with pytest.raises(MediumError) as refused:
            Place(f"rdma://{hard}", StoreOptions()).open()
        assert refused.value.status == "DIRECTORY_ELSEWHERE"
        assert same(read(store, int(store.slots(["a"])[0]), 100), value("a", 100))

    def test_a_header_overwritten_under_a_store_is_noticed(self, store, node):
        store.put(["a"], [value("a", 100)])
        node.raw[:64] = 0
        for call in (
            lambda: store.reserve("b", 1),
            lambda: store.put(["b"], [value("b", 1)]),
            lambda: store.publish("a"),
        ):
            with pytest.raises(MediumError) as refused:
                call()
            assert refused.value.status == "POOL_REPLACED"

    def test_a_new_node_at_the_same_path_is_empty(self, make_store, node):
        store = make_store()
        store.put(["a"], [value("a", 64)])
        store.close()
        node.process.terminate()
        node.process.wait(20)
        with start_node(node.address, DEVICE_BYTES):
            fresh = make_store()
            assert not fresh.exists(["a"])[0]
            with pytest.raises(KeyMissing):
                fresh.slots(["a"])
            fresh.put(["a"], [value("again", 64)])
            assert same(read(fresh, fresh.slots(["a"])[0], 64), value("again", 64))
            fresh.close()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(tmp_path, timeout_s):
    with pytest.raises(UserError, match="timeout"):
        open_store(f"rdma://{tmp_path}/n.sock", LAYOUT, StoreOptions(timeout_s=timeout_s))


def test_no_node_no_store(tmp_path):
    for address in ("", str(tmp_path / "n.sock")):
        with pytest.raises(UserError, match=r"backends\.memory_node --socket .* --size 256M"):
            open_store(f"rdma://{address}", LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_a_node_too_small_for_a_block(tmp_path):
    with start_node(tmp_path / "n.sock", 8192) as node:
        with pytest.raises(UserError, match="do not hold one block"):
            open_store(f"rdma://{tmp_path / 'n.sock'}", LAYOUT)
        maps = Path(f"/proc/{node.pid}/maps")
        assert wait_until(lambda: "emu-registered" not in maps.read_text())
