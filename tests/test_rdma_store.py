"""The store contract over a memory node, and what only an rdma store can meet."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from contract import StoreContract
from contract_base import (
    DEVICE_BYTES,
    LAYOUT,
    Place,
    check_raw,
    read,
    same,
    slots_of,
    tokens_of,
    value,
)
from memory_nodes import raw_node, start_node, wait_until

from backends.node_connection import NodeConnection
from emu import StoreOptions, open_store
from emu.errors import HostError, KeyMissing, MediumError, UserError

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
            assert fault.value.remedy
        store.close()

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


# -- which transport ------------------------------------------------------------------------------------------
def no_device(monkeypatch):
    monkeypatch.setattr("backends.node_verbs.usable_ports", lambda: ([], "no RDMA device here"))


def test_without_a_device_the_process_transport_is_taken_and_said(node, monkeypatch):
    no_device(monkeypatch)
    with open_store(f"rdma://{node.address}", LAYOUT) as store:
        assert store.stats().transport == "process"
        assert store.stats().transport_reason == "no verbs: no RDMA device here"
    with open_store(f"rdma://{node.address}", LAYOUT, StoreOptions(transport="process")) as store:
        assert store.stats().transport_reason == "you asked for it"


def test_verbs_that_were_asked_for_are_never_replaced(node, monkeypatch):
    no_device(monkeypatch)
    with pytest.raises(HostError, match="no verbs: no RDMA device here") as error:
        open_store(f"rdma://{node.address}", LAYOUT, StoreOptions(transport="verbs"))
    assert error.value.capability == "verbs"
    with pytest.raises(UserError, match="no transport 'verb'"):
        open_store(f"rdma://{node.address}", LAYOUT, StoreOptions(transport="verb"))


def test_a_node_on_another_host_is_reached_by_verbs_only(tmp_path, monkeypatch):
    no_device(monkeypatch)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    with pytest.raises(UserError, match=r"start one there: .* --listen 127\.0\.0\.1"):
        open_store(f"rdma://{address}", LAYOUT)
    with start_node(tmp_path / "n.sock", DEVICE_BYTES, "--listen", address):
        with pytest.raises(HostError, match="no verbs"):
            open_store(f"rdma://{address}", LAYOUT)
        with pytest.raises(HostError, match="needs shared memory"):
            open_store(f"rdma://{address}", LAYOUT, StoreOptions(transport="process"))
    with pytest.raises(UserError, match="is not HOST:PORT"):
        open_store("rdma://host0:port", LAYOUT)


def test_a_node_serves_the_beginning_of_a_device(tmp_path):
    device = tmp_path / "cxl0"
    device.write_bytes(bytes(DEVICE_BYTES + 8192))
    rows = value("a", 100)
    with start_node(tmp_path / "n.sock", DEVICE_BYTES, "--device", str(device)):
        with open_store(f"rdma://{tmp_path / 'n.sock'}", LAYOUT) as store:
            store.put(["a"], [rows])
            check_raw(device.read_bytes(), store.publish("a"), rows)
        assert not any(device.read_bytes()[DEVICE_BYTES:])


def test_one_machine_keeps_the_directory(node):
    layout_url = f"rdma://{node.address}"
    connection = NodeConnection(node.address)
    assert connection.claim_directory("another machine")
    with pytest.raises(UserError, match="another host keeps the directory"):
        open_store(layout_url, LAYOUT)
    connection.close()
    assert wait_until(lambda: can_open(layout_url))


def can_open(url):
    try:
        open_store(url, LAYOUT).close()
    except UserError:
        return False
    return True
