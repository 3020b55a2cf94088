"""The rdma store over a real RDMA device: in a guest (tests/test_guest_verbs.py runs it there), or on a machine that has one.

With EMU_TEST_NODE=HOST:PORT and EMU_TEST_DEVICE=PATH the contract also runs against a node on another host that serves
that device, whose bytes are checked here through the device itself.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from contract import StoreContract
from contract_base import DEVICE_BYTES, Place, slots_of, tokens_of, value
from memory_nodes import Client, RawNode, client_of, one_request, raw_node, wait_until

from backends.node_connection import ConnectionOptions
from backends.node_transport import VerbsTransport
from backends.rdma import directory_path
from emu import StoreOptions, _native, open_store
from emu.errors import HostError, MediumError, UserError
from emu.rdma_ports import usable_ports

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("verbs")

WIDTH, ROW, OFFSET = 656, 132, 4096
VERBS = StoreOptions(transport="verbs")
READ, WRITE, PACK = _native.Opcode.READ, _native.Opcode.WRITE, _native.Opcode.PACK
SUCCESS, FLUSHED = "IBV_WC_SUCCESS", "IBV_WC_WR_FLUSH_ERR"
NO_ACCESS, NO_ANSWER = "IBV_WC_REM_ACCESS_ERR", "IBV_WC_RETRY_EXC_ERR"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawNode]:
    with raw_node(tmp_path_factory.mktemp("node"), DEVICE_BYTES) as node:
        yield node


def forget(address: str) -> None:
    """Remove what a store left beside a node."""
    for left in Path(directory_path(address)).parent.glob(Path(directory_path(address)).name + "*"):
        left.unlink()


def client_on(node: RawNode, **options: object) -> contextlib.AbstractContextManager[Client]:
    return client_of(node, options=ConnectionOptions(transport="verbs", **options))


class VerbsContract(StoreContract):
    def test_a_sparse_read_and_a_packed_one(self, store):
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
            assert (stats.transport, bool(stats.transport_reason)) == ("verbs", True)
            assert np.array_equal(out[0], rows["kv"][2, tokens[0]])


class TestLoopback(VerbsContract):
    @pytest.fixture
    def place(self, node):
        node.raw[:] = 0
        forget(node.address)
        return Place(f"rdma://{node.address}", VERBS)

    @pytest.fixture
    def raw(self, node):
        return lambda store: node.raw.tobytes()


@pytest.mark.skipif("EMU_TEST_NODE" not in os.environ, reason="no node on another host was named")
class TestAcrossHosts(VerbsContract):
    @pytest.fixture
    def device(self):
        fd = os.open(os.environ["EMU_TEST_DEVICE"], os.O_RDWR)
        with mmap.mmap(fd, -(-DEVICE_BYTES // (2 << 20)) * (2 << 20)) as memory:
            yield memory
        os.close(fd)

    @pytest.fixture
    def place(self, device):
        device[:DEVICE_BYTES] = bytes(DEVICE_BYTES)
        forget(os.environ["EMU_TEST_NODE"])
        return Place(f"rdma://{os.environ['EMU_TEST_NODE']}", VERBS)

    @pytest.fixture
    def raw(self, device):
        return lambda store: device[:DEVICE_BYTES]


# -- what is chosen -------------------------------------------------------------------------------------------
def test_auto_takes_verbs_and_says_why(node: RawNode) -> None:
    with client_of(node) as client:
        assert client.connection.transport == "verbs"
        assert "came through" in client.connection.transport_reason
    with client_of(node, options=ConnectionOptions(transport="process")) as client:
        assert client.connection.transport == "process"


def test_auto_does_without_verbs_that_carry_nothing(node: RawNode, monkeypatch) -> None:
    def nothing_comes(transport: object) -> None:
        raise OSError(110, "nothing comes through")

    monkeypatch.setattr(VerbsTransport, "_try", nothing_comes)
    with client_of(node) as client:
        assert client.connection.transport == "process"
        assert client.connection.transport_reason == "no verbs: nothing comes through"
        out = np.zeros(64, np.uint8)
        client.requester.read(128, out)
        assert np.array_equal(out, node.raw[128:192])
    with pytest.raises(HostError, match="nothing comes through"), client_on(node):
        pass


def test_the_gid_is_the_ipv4_one(node: RawNode) -> None:
    ports, _ = usable_ports()
    with client_on(node) as client:
        _, _, mtu, gid = client.connection.queue_pair.endpoint
        assert bytes(gid[:12]) == bytes(10) + b"\xff\xff"
        assert ".".join(map(str, gid[12:])) in {port.address for port in ports}
        assert 1 <= mtu <= 5


# -- rows -----------------------------------------------------------------------------------------------------
def rows_of(node: RawNode, blocks: list[int], tokens: np.ndarray) -> np.ndarray:
    start = OFFSET + (np.array(blocks)[tokens // 64] * 64 + tokens % 64) * ROW
    return node.raw[start[:, None] + np.arange(ROW)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"send_queue_depth": 2}, {"max_rd_atomic": 1}])
def test_reads_of_any_order_and_place_are_exact(node: RawNode, options, packed: bool) -> None:
    random = np.random.default_rng(3)
    node.raw[:] = random.integers(0, 256, node.raw.size, np.uint8)
    tables, slots = one_request([5, 1, 2, 9])
    with client_on(node, **options) as client:
        registered = client.buffer(300, ROW)
        for out in (registered, np.empty((300, ROW), np.uint8)):
            out[:] = 0xEE
            tokens = random.integers(0, 256, 200).astype(np.int32)
            places = random.permutation(300)[:200].astype(np.int32)
            expected = out.copy()
            expected[places] = rows_of(node, [5, 1, 2, 9], tokens)
            move = client.requester.pack_rows if packed else client.requester.read_rows
            assert move(tables, 0, OFFSET, ROW, slots, tokens[None], out, places[None]) == 200
            assert np.array_equal(out, expected)
        limit = options.get("max_rd_atomic", 16)
        assert client.connection.queue_pair.max_outstanding_reads <= limit


def test_scatter_lists_are_as_long_as_the_device_takes(node: RawNode) -> None:
    tables, slots = one_request([0])
    with client_on(node) as client:
        most = client.connection.queue_pair.max_sge
        out = client.buffer(128, ROW)
        places = tokens_of(range(0, 128, 2))
        client.requester.read_rows(tables, 0, OFFSET, ROW, slots, tokens_of(range(64)), out, places)
        assert client.requester.reads == -(-64 // most)
        assert np.array_equal(out[::2], rows_of(node, [0], np.arange(64)))


def test_writes_touch_their_rows_only(node: RawNode) -> None:
    tables, slots = one_request([3, 1], length=0)
    with client_on(node) as client:
        rows = np.random.default_rng(4).integers(0, 256, (1, 100, ROW), np.uint8)
        expected = node.raw.copy()
        start = OFFSET + (np.array([3, 1])[np.arange(100) // 64] * 64 + np.arange(100) % 64) * ROW
        expected[start[:, None] + np.arange(ROW)] = rows[0]
        client.requester.write_rows(tables, 0, OFFSET, ROW, slots, np.zeros(1, np.int32), rows)
        assert client.requester.writes == 2
        assert np.array_equal(node.raw, expected)


def test_more_rows_than_one_message_or_the_staging_memory_holds(node: RawNode) -> None:
    blocks = list(range(30))
    tables, slots = one_request(blocks)
    tokens = np.random.default_rng(2).integers(0, 30 * 64, 9000).astype(np.int32)
    with client_on(node) as client:
        for packed in (False, True):
            out = np.zeros((9000, ROW), np.uint8)
            move = client.requester.pack_rows if packed else client.requester.read_rows
            move(tables, 0, OFFSET, ROW, slots, tokens[None], out, None)
            assert np.array_equal(out, rows_of(node, blocks, tokens))
        assert client.requester.packs > 1


# -- faults ---------------------------------------------------------------------------------------------------
def request(client: Client, opcode, **changes) -> _native.WorkRequest:
    fields = {"rkey": client.rkey, "offset": 128, "address": client.memory.address, "nbytes": 64}
    fields |= {"lkey": client.lkey} | changes
    sge = [(fields["address"], fields["nbytes"], fields["lkey"])]
    return _native.WorkRequest(opcode, 7, fields["rkey"], fields["offset"], sge)


def test_an_error_flushes_what_follows(node: RawNode) -> None:
    with client_on(node) as client:
        client.buffer(4096)
        good, bad = request(client, READ), request(client, READ, rkey=client.rkey ^ 0xFF)
        assert client.run(good, bad, good, good) == [SUCCESS, NO_ACCESS, FLUSHED, FLUSHED]
        assert np.array_equal(client.memory.array()[:64], node.raw[128:192])
        assert client.run(good) == [FLUSHED]


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("changes", [{"offset": 4096 - 63}, {"offset": 1 << 40}, {"nbytes": 4097}])
def test_remote_bounds(node: RawNode, opcode, changes) -> None:
    before = node.raw.copy()
    options = ConnectionOptions(transport="verbs")
    with client_of(node, options=options, exposed=(8192, 4096)) as client:
        client.buffer(8192)[:] = 0xAB
        assert client.run(request(client, opcode, **({"offset": 0} | changes))) == [NO_ACCESS]
        assert (client.memory.array() == 0xAB).all()
    assert np.array_equal(node.raw, before)


def test_access_rights(node: RawNode) -> None:
    before = node.raw.copy()
    options = ConnectionOptions(transport="verbs")
    for access, refused in (("remote_read", "write"), ("remote_write", "read")):
        with client_of(node, options=options, access=(access,)) as client:
            with pytest.raises(_native.WorkFault) as fault:
                getattr(client.requester, refused)(0, np.zeros(64, np.uint8))
            assert fault.value.args[0] == NO_ACCESS
    assert np.array_equal(node.raw, before)


def test_a_key_of_another_connection_opens_nothing(node: RawNode) -> None:
    with client_on(node) as client, client_on(node) as other:
        other.buffer(64)
        assert other.run(request(other, READ, rkey=client.rkey)) == [NO_ACCESS]


@pytest.mark.parametrize("where", ["past the end", "wrong key", "deregistered"])
def test_local_memory_past_a_registration_is_never_touched(node: RawNode, where: str) -> None:
    with client_on(node) as client:
        pages = client.buffer(4096)
        pages[:] = 0xAB
        changes: dict[str, int] = {}
        if where == "past the end":
            changes["address"] = client.memory.address + 4096 - 63
        if where == "wrong key":
            changes["lkey"] = client.lkey ^ 0xFF
        if where == "deregistered":
            client.connection.deregister(client.lkey)
        (status,) = client.run(request(client, READ, **changes))
        assert status in {"IBV_WC_LOC_PROT_ERR", "IBV_WC_LOC_QP_OP_ERR", "IBV_WC_LOC_LEN_ERR"}
        assert (pages == 0xAB).all()


@pytest.mark.parametrize("fault", ["row", "target", "key", "short", "count"])
def test_a_pack_that_fails_writes_nothing_and_ends_the_queue_pair(node: RawNode, fault) -> None:
    with client_on(node, timeout_s=8.0) as client:
        pages = client.buffer(8192)
        pages[:] = 0xAB
        target = client.memory.address + (8192 - 100 if fault == "target" else 4096)
        offsets = [0, node.raw.size - (63 if fault == "row" else 64)]
        keys = client.rkey ^ (0xFF * (fault == "key")), client.local.remote_key
        count = 2 + (1 << 31) * (fault == "count")
        message = struct.pack("<IIIIQ2Q", keys[0], 64, count, keys[1], target, *offsets)
        message = message[: 20 if fault == "short" else None]
        pages[: len(message)] = np.frombuffer(message, np.uint8)
        (status,) = client.run(request(client, PACK, nbytes=len(message)))
        wanted = {"row": {NO_ACCESS}, "key": {NO_ACCESS}, "target": {FLUSHED, NO_ANSWER}}
        assert status in wanted.get(fault, {"IBV_WC_REM_INV_REQ_ERR"})
        assert (pages[4096:] == 0xAB).all()
        assert client.run(request(client, READ)) == [FLUSHED]


def test_a_dead_store_says_so_and_a_new_one_works(node: RawNode) -> None:
    node.raw[:] = 0
    forget(node.address)
    layout = Place("", VERBS).layout
    with open_store(f"rdma://{node.address}", layout, VERBS) as store:
        store.put(["a"], [value("a", 64)])
        out = store.buffer(WIDTH).reshape(1, 1, WIDTH)
        medium = store._medium  # what breaks a queue pair, a store's own calls cannot do
        with pytest.raises(MediumError) as fault:
            medium.read(DEVICE_BYTES, 64)
        assert fault.value.status == NO_ACCESS
        with pytest.raises(MediumError, match="error state") as fault:
            store.gather(store.slots(["a"]), 0, tokens_of([3]), out)
        assert fault.value.status == FLUSHED
        assert "open it again" in fault.value.remedy
    with open_store(f"rdma://{node.address}", layout, VERBS) as store:
        store.put(["b"], [value("b", 64)])
        store.gather(
            store.slots(["b"]), 0, tokens_of([3]), out := store.buffer(WIDTH).reshape(1, 1, WIDTH)
        )
        assert np.array_equal(out[0, 0], value("b", 64)["kv"][0, 3])


def test_a_killed_node_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    with raw_node(tmp_path, DEVICE_BYTES) as node:
        layout = Place("", VERBS).layout
        store = open_store(f"rdma://{node.address}", layout, VERBS)
        store.put(["a"], [value("a", 64)])
        slot = store.slots(["a"])[0]
        out = store.buffer(WIDTH).reshape(1, 1, WIDTH)
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(20)
        began = time.monotonic()
        statuses = []
        for packed in (False, True):
            with pytest.raises(MediumError) as fault:
                store.gather(slots_of(slot), 0, tokens_of([3]), out, packed=packed)
            statuses.append(fault.value.status)
        assert statuses == [NO_ANSWER, FLUSHED]
        assert time.monotonic() - began < 60
        store.close()


def test_a_stopped_node_still_serves_reads_but_no_packs(tmp_path: Path) -> None:
    """READs are the device's: the node's process has no part in them."""
    with raw_node(tmp_path, DEVICE_BYTES) as node, client_on(node, timeout_s=6.0) as client:
        tables, slots = one_request([0])
        out = client.buffer(8, ROW)
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            client.requester.read_rows(
                tables, 0, OFFSET, ROW, slots, tokens_of(range(8)), out, None
            )
            with pytest.raises(_native.WorkFault) as fault:
                client.requester.pack_rows(
                    tables, 0, OFFSET, ROW, slots, tokens_of([1, 3]), out, None
                )
            assert fault.value.args[0] == NO_ANSWER
        finally:
            os.kill(node.process.pid, signal.SIGCONT)


def test_the_node_forgets_a_client_that_left(node: RawNode) -> None:
    def queue_pairs() -> int:
        with client_of(node, options=ConnectionOptions(transport="process")) as client:
            return client.connection.describe()["queue_pairs"]

    with client_on(node):
        assert queue_pairs() == 2
    assert wait_until(lambda: queue_pairs() == 1)


def test_a_second_host_may_not_keep_the_directory_too(node: RawNode) -> None:
    with client_on(node) as one, client_on(node) as other:
        assert one.connection.claim_directory("here")
        assert not other.connection.claim_directory("there")
        assert other.connection.claim_directory("here")
    layout = Place("", VERBS).layout
    with client_on(node) as other:
        other.connection.claim_directory("there")
        with pytest.raises(UserError, match="another host keeps the directory"):
            open_store(f"rdma://{node.address}", layout, VERBS)
