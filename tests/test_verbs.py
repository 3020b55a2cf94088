"""The data plane against the memory node's raw bytes."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_nodes import BLOCK, OFFSET, Client, RawNode, client_of, one_request, raw_node, tokens_of

from backends.node_connection import ConnectionOptions
from emu import _native

if TYPE_CHECKING:
    from collections.abc import Iterator

READ, WRITE, PACK = _native.Opcode.READ, _native.Opcode.WRITE, _native.Opcode.PACK
SUCCESS, FLUSHED = "IBV_WC_SUCCESS", "IBV_WC_WR_FLUSH_ERR"
NO_ACCESS, NO_LOCAL = "IBV_WC_REM_ACCESS_ERR", "IBV_WC_LOC_PROT_ERR"
ROW = 132


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawNode]:
    with raw_node(tmp_path_factory.mktemp("node")) as node:
        node.raw[:] = np.random.default_rng(0).integers(0, 256, node.raw.size, np.uint8)
        yield node


@pytest.fixture
def client(node: RawNode) -> Iterator[Client]:
    with client_of(node) as client:
        yield client


def read_rows(client: Client, tables, slots, tokens, out, out_rows=None, *, packed=False) -> int:
    move = client.requester.pack_rows if packed else client.requester.read_rows
    return move(tables, 0, OFFSET, out.shape[1], slots, tokens, out, out_rows)


def remote_rows(
    node: RawNode, blocks: list[int], prompt: int, tokens: np.ndarray, width: int
) -> np.ndarray:
    """The rows of a request's tokens, by the block table's rule written a second time."""
    appended = tokens >= prompt
    t = np.where(appended, tokens - prompt, tokens)
    entry = t // BLOCK + np.where(appended, -(-prompt // BLOCK), 0)
    start = OFFSET + (np.array(blocks)[entry] * BLOCK + t % BLOCK) * width
    return node.raw[start[:, None] + np.arange(width)]


# -- rows -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    width=st.sampled_from([132, 656, 1152]),
    prompt=st.integers(1, 300),
    packed=st.booleans(),
    registered=st.booleans(),
    placed=st.booleans(),
)
def test_reads_are_byte_exact(
    shared_client, node, data, width, prompt, packed, registered, placed
) -> None:
    blocks = data.draw(st.permutations(range(12)))[: -(-prompt // BLOCK) + 2]
    capacity = prompt + 2 * BLOCK
    tables, slots = one_request(blocks, prompt=prompt, length=capacity)
    tokens = np.array(data.draw(st.lists(st.integers(-1, capacity - 1), max_size=150)), np.int32)
    places = np.random.default_rng(1).permutation(160)[: tokens.size].astype(np.int32)
    out = (
        shared_client.pages[: 160 * width].reshape(160, width)
        if registered
        else np.empty((160, width), np.uint8)
    )
    out[:] = 0xEE
    expected = out.copy()
    wanted = tokens >= 0
    target = places if placed else np.arange(tokens.size)
    expected[target[wanted]] = remote_rows(node, blocks, prompt, tokens[wanted], width)
    before = node.raw.copy()
    out_rows = places[None] if placed else None
    fetched = read_rows(shared_client, tables, slots, tokens[None], out, out_rows, packed=packed)
    assert fetched == wanted.sum()
    assert np.array_equal(out, expected)
    assert np.array_equal(node.raw, before)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    width=st.sampled_from([132, 656]),
    prompt=st.integers(1, 200),
    n=st.integers(0, 130),
    registered=st.booleans(),
)
def test_writes_touch_their_rows_only(
    shared_client, node, data, width, prompt, n, registered
) -> None:
    blocks = data.draw(st.permutations(range(12)))[: -(-prompt // BLOCK) + 3]
    length = data.draw(st.integers(0, prompt + 3 * BLOCK - n))
    start = data.draw(st.integers(0, length))
    tables, slots = one_request(blocks, prompt=prompt, length=length)
    rows = (
        shared_client.pages[: n * width].reshape(1, n, width)
        if registered
        else np.empty((1, n, width), np.uint8)
    )
    rows[:] = np.random.default_rng(n).integers(0, 256, rows.shape, np.uint8)
    expected = replace(node, raw=node.raw.copy())
    written = shared_client.requester.write_rows(
        tables, 0, OFFSET, width, slots, np.array([start], np.int32), rows
    )
    assert written == n
    assert tables.length(slots[0], 0) == max(length, start + n)
    tokens = np.arange(start, start + n)
    assert np.array_equal(remote_rows(node, blocks, prompt, tokens, width), rows[0])
    changed = np.flatnonzero(node.raw != expected.raw)
    rows_changed = set((changed - OFFSET) // width)
    numbers = remote_rows(_row_numbers(node, width), blocks, prompt, tokens, width)[:, :4].copy()
    assert rows_changed <= set(numbers.view(np.int32)[:, 0])


def _row_numbers(node: RawNode, width: int) -> RawNode:
    """The node as if every row began with its own number."""
    raw = np.zeros(node.raw.size, np.uint8)
    rows = raw[OFFSET : OFFSET + (raw.size - OFFSET) // width * width].reshape(-1, width)
    rows[:, :4] = np.arange(len(rows), dtype=np.int32).view(np.uint8).reshape(-1, 4)
    return replace(node, raw=raw)


@pytest.fixture(scope="module")
def shared_client(node: RawNode) -> Iterator[Client]:
    with client_of(node) as client:
        client.pages = client.buffer(160 * 1152)
        yield client


def test_more_rows_than_the_staging_memory_holds(node: RawNode) -> None:
    width, count = 1152, 2500
    blocks = list(range(count // BLOCK + 1))
    tables, slots = one_request(blocks, prompt=count)
    tokens = np.random.default_rng(2).permutation(count).astype(np.int32)
    with client_of(node) as client:
        for packed in (False, True):
            out = np.zeros((count, width), np.uint8)
            read_rows(client, tables, slots, tokens[None], out, packed=packed)
            assert np.array_equal(out, remote_rows(node, blocks, count, tokens, width))
        assert 1 < client.requester.packs < 10


# -- work requests --------------------------------------------------------------------------------------------


def test_one_work_request_per_remote_contiguous_run(client: Client) -> None:
    tables, slots = one_request([3, 1, 2])
    out = client.buffer(192, ROW)
    read_rows(client, tables, slots, tokens_of(range(0, 192, 2)), out)
    assert (client.requester.reads, client.requester.work_requests) == (96, 96)
    client.requester.reset_counters()
    read_rows(client, tables, slots, tokens_of(range(64)), out)
    assert client.requester.reads == 1
    client.requester.reset_counters()
    read_rows(client, tables, slots, tokens_of(range(192)), out)  # blocks 3 | 1 2: two runs
    assert client.requester.reads == 2
    client.requester.reset_counters()
    read_rows(client, tables, slots, tokens_of([5, 6, 9, 10, 11, 4]), out)
    assert client.requester.reads == 3


def test_scatter_list_holds_30_entries(client: Client) -> None:
    tables, slots = one_request([0])
    out = client.buffer(128, ROW)
    read_rows(client, tables, slots, tokens_of(range(64)), out, tokens_of(range(0, 128, 2)))
    assert client.requester.reads == 3  # ceil(64 / 30)
    sge = [(client.memory.address, 1, client.lkey)] * 31
    with pytest.raises(ValueError, match="at most 30"):
        _native.WorkRequest(READ, 0, client.rkey, 0, sge)


def test_write_runs_coalesce_and_pack_is_one_message(client: Client) -> None:
    tables, slots = one_request([5, 1, 2], length=0)
    rows = client.buffer(1, 192, ROW)
    client.requester.write_rows(tables, 0, OFFSET, ROW, slots, np.zeros(1, np.int32), rows)
    assert client.requester.writes == 2
    client.requester.reset_counters()
    read_rows(
        client, tables, slots, tokens_of(range(0, 192, 3)), client.buffer(64, ROW), packed=True
    )
    requester = client.requester
    assert (requester.packs, requester.work_requests, requester.reads) == (1, 1, 0)


@pytest.mark.parametrize("limit", [1, 4, 16])
def test_outstanding_reads_stay_within_max_rd_atomic(node: RawNode, limit: int) -> None:
    tables, slots = one_request([0, 1])
    with client_of(node, options=ConnectionOptions(max_rd_atomic=limit)) as client:
        read_rows(client, tables, slots, tokens_of(range(0, 128, 2)), client.buffer(64, ROW))
        assert client.connection.queue_pair.max_outstanding_reads == limit
        client.requester.reset_counters()
        read_rows(client, tables, slots, tokens_of([3]), client.buffer(1, ROW))
        assert client.connection.queue_pair.max_outstanding_reads == 1


@pytest.mark.parametrize("depth", [2, 8])
def test_a_batch_larger_than_the_send_queue_goes_in_parts(node: RawNode, depth: int) -> None:
    tables, slots = one_request([1, 0])
    tokens = np.arange(0, 128, 2, dtype=np.int32)
    with client_of(node, options=ConnectionOptions(send_queue_depth=depth)) as client:
        out = client.buffer(64, ROW)
        read_rows(client, tables, slots, tokens[None], out)
        assert np.array_equal(out, remote_rows(node, [1, 0], 128, tokens, ROW))
        assert client.requester.reads == 64
        assert client.requester.completions >= 64 // (depth // 2)
        requests = [_native.WorkRequest(READ, i, client.rkey, 0, []) for i in range(depth + 3)]
        assert client.connection.queue_pair.post(requests) == depth


@pytest.mark.parametrize("depth", [0, 1, 3, 1 << 20])
def test_send_queue_depth_is_a_power_of_two(depth: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        _native.RingQueuePair(depth, 16, 1.0)


# -- faults ---------------------------------------------------------------------------------------------------


def test_an_error_flushes_what_follows(client: Client, node: RawNode) -> None:
    client.buffer(4096)
    local = [(client.memory.address, 64, client.lkey)]

    def read(rkey: int) -> _native.WorkRequest:
        return _native.WorkRequest(READ, 7, rkey, 128, local)

    good, bad = client.rkey, client.rkey ^ 1
    assert client.run(read(good), read(bad), read(good), read(good)) == [
        SUCCESS,
        NO_ACCESS,
        FLUSHED,
        FLUSHED,
    ]
    assert np.array_equal(client.memory.array()[:64], node.raw[128:192])
    assert client.run(read(good)) == [FLUSHED]


@pytest.mark.parametrize(
    ("rkey_change", "offset", "nbytes"),
    [(1, 0, 64), (0, 4096 - 63, 64), (0, 4096, 1), (0, 2**64 - 32, 64), (0, 0, 4097)],
)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_remote_bounds_and_keys(
    node: RawNode, opcode, rkey_change: int, offset: int, nbytes: int
) -> None:
    before = node.raw.copy()
    with client_of(node, exposed=(8192, 4096)) as client:
        client.buffer(8192)[:] = 0xAB
        local = [(client.memory.address, nbytes, client.lkey)]
        request = _native.WorkRequest(opcode, 1, client.rkey ^ rkey_change, offset, local)
        assert client.run(request) == [NO_ACCESS]
        assert (client.memory.array() == 0xAB).all()
    assert np.array_equal(node.raw, before)


def test_access_rights(node: RawNode) -> None:
    before = node.raw.copy()
    for access, refused in (("remote_read", "write"), ("remote_write", "read")):
        with client_of(node, access=(access,)) as client:
            with pytest.raises(_native.WorkFault) as fault:
                getattr(client.requester, refused)(0, np.zeros(64, np.uint8))
            assert fault.value.args[0] == NO_ACCESS
    assert np.array_equal(node.raw, before)


def test_a_key_of_another_connection_opens_nothing(node: RawNode, client: Client) -> None:
    client.buffer(64)
    with client_of(node) as other:
        other.buffer(64)
        local = [(other.memory.address, 64, other.lkey)]
        assert other.run(_native.WorkRequest(READ, 1, client.rkey, 0, local)) == [NO_ACCESS]


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize(
    "where", ["past the end", "before", "unregistered", "wrong key", "deregistered"]
)
def test_local_memory_past_a_registration_is_never_touched(
    node: RawNode, opcode, where: str
) -> None:
    before = node.raw.copy()
    with client_of(node) as client:
        pages = client.buffer(4096)
        pages[:] = 0xAB
        stranger = np.full(4096, 0xCD, np.uint8)
        address = {
            "past the end": client.memory.address + 4096 - 655,
            "before": client.memory.address - 1,
        }
        if where == "deregistered":
            client.connection.deregister(client.lkey)
        lkey = client.lkey ^ (where == "wrong key")
        first = (
            stranger.ctypes.data
            if where == "unregistered"
            else address.get(where, client.memory.address)
        )
        request = _native.WorkRequest(opcode, 1, client.rkey, 0, [(first, 656, lkey)])
        assert client.run(request) == [NO_LOCAL]
        assert (pages == 0xAB).all()
        assert (stranger == 0xCD).all()
    assert np.array_equal(node.raw, before)


def _pack(client: Client, message: bytes) -> list[str]:
    pages = client.memory.array()
    pages[: len(message)] = np.frombuffer(message, np.uint8)
    return client.run(
        _native.WorkRequest(PACK, 1, 0, 0, [(client.memory.address, len(message), client.lkey)])
    )


@pytest.mark.parametrize("fault", ["row", "target", "key", "short", "count"])
def test_a_pack_that_fails_writes_nothing(node: RawNode, fault: str) -> None:
    with client_of(node) as client:
        pages = client.buffer(8192)
        pages[:] = 0xAB
        target = client.memory.address + (8192 - 100 if fault == "target" else 4096)
        rkey, lkey = client.rkey ^ (fault == "key"), client.lkey
        offsets = [0, node.raw.size - (63 if fault == "row" else 64)]
        count = 2 + (1 << 31) * (fault == "count")
        message = struct.pack("<IIIIQ2Q", rkey, 64, count, lkey, target, *offsets)
        status = _pack(client, message[: 20 if fault == "short" else None])
        wanted = {"row": NO_ACCESS, "key": NO_ACCESS, "target": NO_LOCAL}
        assert status == [wanted.get(fault, "IBV_WC_REM_INV_REQ_ERR")]
        assert (pages[4096:] == 0xAB).all()


def test_a_pack_message_brings_the_rows_in_order(client: Client, node: RawNode) -> None:
    client.buffer(8192)
    offsets = [999, 3, node.raw.size - 64]
    header = (client.rkey, 64, 3, client.lkey, client.memory.address + 4096)
    assert _pack(client, struct.pack("<IIIIQ3Q", *header, *offsets)) == [SUCCESS]
    expected = np.concatenate([node.raw[o : o + 64] for o in offsets])
    assert np.array_equal(client.memory.array()[4096 : 4096 + 192], expected)


def test_rows_past_the_remote_region_fault_and_lengths_stay(node: RawNode) -> None:
    with client_of(node, exposed=(0, OFFSET + 64 * ROW)) as client:
        tables, slots = one_request([0, 1], length=10)
        rows = np.ones((1, 100, ROW), np.uint8)
        with pytest.raises(_native.WorkFault, match="REM_ACCESS"):
            client.requester.write_rows(
                tables, 0, OFFSET, ROW, slots, np.array([10], np.int32), rows
            )
        assert tables.length(slots[0], 0) == 10
        with pytest.raises(_native.WorkFault, match="error state") as later:
            client.requester.read(0, np.empty(1, np.uint8))
        assert later.value.args[0] == FLUSHED


def test_bad_slots_tokens_and_shapes_post_nothing(client: Client, node: RawNode) -> None:
    tables, slots = one_request([0, 1], prompt=100, shared=64, length=100)
    out = client.buffer(4, ROW)
    out[:] = 0xAB
    before = node.raw.copy()

    def read(tokens, out=out, slots=slots, out_rows=None):
        return lambda: read_rows(client, tables, slots, tokens, out, out_rows)

    def write(start, n, width=ROW):
        rows = np.zeros((1, n, width), np.uint8)
        return lambda: client.requester.write_rows(
            tables, 0, OFFSET, ROW, slots, np.array([start], np.int32), rows
        )

    sealed = out.view()
    sealed.flags.writeable = False
    refusals = [
        (_native.SlotFault, read(tokens_of([1]), slots=slots + (1 << 32))),
        (_native.SlotFault, read(tokens_of([1]), slots=np.array([-1]))),
        (_native.TokenFault, read(tokens_of([1, 100]))),
        (_native.TokenFault, read(tokens_of([-2]))),
        (IndexError, read(tokens_of(range(5)))),  # short buffer
        (IndexError, read(tokens_of([1]), out_rows=tokens_of([4]))),
        (IndexError, read(tokens_of([1]), out_rows=tokens_of([-1]))),
        (ValueError, read(tokens_of([1]), out_rows=tokens_of([1, 2]))),
        (ValueError, read(tokens_of([1], [2]))),
        (TypeError, read(tokens_of([1]), out=sealed)),
        (TypeError, read(tokens_of([1]), out=out[:, ::2])),
        (TypeError, read(tokens_of([1]).astype(np.int64))),
        (_native.TokenFault, write(63, 1)),  # shared
        (_native.TokenFault, write(101, 1)),  # a gap
        (_native.TokenFault, write(100, 1)),  # more than was reserved
        (ValueError, write(64, 1, width=ROW + 4)),
    ]
    for kind, call in refusals:
        with pytest.raises(kind):
            call()
    assert client.requester.work_requests == 0
    assert (out == 0xAB).all()
    assert np.array_equal(node.raw, before)


# -- several clients ------------------------------------------------------------------------------------------


def test_two_clients_at_once(node: RawNode) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        blocks = [number * 8 + i for i in range(8)]
        tables, slots = one_request(blocks, length=0)
        rng = np.random.default_rng(number)
        with client_of(node) as client:
            out = client.buffer(512, ROW)
            for turn in range(20):
                rows = rng.integers(0, 256, (1, 512, ROW), np.uint8)
                client.requester.write_rows(
                    tables, 0, OFFSET, ROW, slots, np.zeros(1, np.int32), rows
                )
                tokens = rng.permutation(512).astype(np.int32)
                read_rows(client, tables, slots, tokens[None], out, packed=turn % 2 == 0)
                if not np.array_equal(out, rows[0, tokens]):
                    failures.append(f"client {number} turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_client_that_scribbles_over_its_rings_harms_nobody(node: RawNode, client: Client) -> None:
    before = node.raw.copy()
    rng = np.random.default_rng(3)
    for _ in range(8):
        with client_of(node) as vandal:
            queue_pair = vandal.connection.queue_pair
            size = os.fstat(queue_pair.fds[0]).st_size
            with mmap.mmap(queue_pair.fds[0], size) as rings:
                rings[512:] = rng.integers(0, 256, size - 512, np.uint8).tobytes()
                rings[0:8] = struct.pack("<Q", int(rng.integers(1, 2000)))  # the send queue's tail
            os.eventfd_write(queue_pair.fds[1], 1)
            out = np.zeros(64, np.uint8)
            client.requester.read(0, out)
            assert np.array_equal(out, node.raw[:64])
    assert np.array_equal(node.raw, before)
