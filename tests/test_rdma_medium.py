"""The rdma medium: bytes and counters, and a memory node that dies, is stopped, or binds no memory."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from memory_nodes import (
    OFFSET,
    RawNode,
    client_of,
    line_of,
    one_request,
    process_state,
    python,
    raw_node,
    start_node,
    tokens_of,
    wait_until,
)

from backends.node_connection import ConnectionOptions
from backends.rdma import RdmaMedium
from emu import _native
from emu.errors import MediumError
from emu.numa import NumaWarning
from emu.pool.medium import Gather, Region
from emu.store import Stats

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RawNode]:
    with raw_node(tmp_path) as node:
        yield node


ROW = 656
GONE = "IBV_WC_RETRY_EXC_ERR"


def test_the_medium_moves_raw_bytes_and_counts(node: RawNode) -> None:
    medium = RdmaMedium(node.address)
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8)
    medium.write(100, data.tobytes())
    assert np.array_equal(node.raw[100 : 100 + data.size], data)
    assert medium.read(100, data.size) == data.tobytes()
    assert medium.read(0, 0) == b""
    assert medium.directory_path == f"{node.address}.directory"
    assert (medium.size_bytes, medium.buffer(0).size) == (node.raw.size, 0)
    tables, slots = one_request([1])
    out = medium.buffer(8 * ROW).reshape(8, ROW)
    region = Region(0, OFFSET, ROW)
    even = tokens_of(range(0, 16, 2))
    medium.reset_stats()
    assert medium.gather(tables, region, Gather(slots, even, out)) == 8
    assert medium.gather(tables, region, Gather(slots, even, out, packed=True)) == 8
    stats = Stats()
    medium.add_stats(stats)
    assert (stats.work_requests, stats.max_outstanding_reads) == (9, 8)
    medium.check()
    medium.close()
    medium.close()
    with pytest.raises(MediumError):
        medium.read(0, 1)


def test_a_killed_node_is_noticed_at_once(node: RawNode) -> None:
    timeout_s = 100.0
    medium = RdmaMedium(node.address, options=ConnectionOptions(timeout_s=timeout_s))
    tables, slots = one_request([0, 1], length=64)
    out = medium.buffer(64 * ROW).reshape(64, ROW)
    region = Region(0, OFFSET, ROW)

    def gather() -> None:
        medium.gather(tables, region, Gather(slots, tokens_of(range(0, 64, 2)), out))

    def gather_until_it_fails() -> None:
        while True:
            gather()

    gather()
    os.kill(node.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(MediumError) as fault:
        gather_until_it_fails()
    assert fault.value.status == GONE
    for call in (
        gather,
        lambda: medium.read(0, 1),
        lambda: medium.write(0, b"x"),
        lambda: medium.buffer(4096),
        medium.check,
        lambda: medium.scatter(
            tables, region, slots, np.array([64], np.int32), np.zeros((1, 1, ROW), np.uint8)
        ),
    ):
        with pytest.raises(MediumError):
            call()
    assert time.monotonic() - started < timeout_s  # nothing waited for it
    assert tables.length(slots[0], 0) == 64
    out[:] = 1  # the buffer outlives the node
    medium.close()


def test_a_node_killed_under_load_gives_an_error_in_every_client(node: RawNode) -> None:
    program = f"""
        from backends.rdma import RdmaMedium
        from emu.errors import MediumError
        medium = RdmaMedium({node.address!r})
        print("ready", flush=True)
        try:
            while True:
                medium.read(0, 2 << 20)
        except MediumError as error:
            print(error.status)
        """
    with ExitStack() as stack:
        clients = [stack.enter_context(python(program)) for _ in range(2)]
        assert [line_of(client) for client in clients] == ["ready", "ready"]
        os.kill(node.process.pid, signal.SIGKILL)
        for client in clients:
            assert client.communicate(timeout=20)[0] == f"{GONE}\n"
            assert client.returncode == 0


def test_a_stopped_node_ends_a_call_after_the_timeout(node: RawNode) -> None:
    options = ConnectionOptions(timeout_s=0.5)
    medium = RdmaMedium(node.address, options=options)
    try:
        os.kill(node.process.pid, signal.SIGSTOP)
        assert wait_until(lambda: process_state(node.process.pid) == "T")
        with pytest.raises(MediumError) as fault:
            medium.read(0, 64)
        assert fault.value.status == GONE
        assert f"kill -CONT {node.process.pid}" in fault.value.remedy
        with pytest.raises(MediumError, match="error state"):
            medium.write(0, b"late")
        for call in (medium.check, lambda: RdmaMedium(node.address, options=options)):
            with pytest.raises(MediumError, match=f"{node.process.pid} is stopped") as fault:
                call()
            assert fault.value.status == GONE
    finally:
        os.kill(node.process.pid, signal.SIGCONT)
    medium.close()
    with client_of(node) as client:  # the node itself goes on
        client.requester.read(0, np.empty(64, np.uint8))
    assert not node.raw[:4].any()


def numa_stats(medium: RdmaMedium) -> Stats:
    stats = Stats()
    medium.add_stats(stats)
    medium.close()
    return stats


def test_a_numa_node_that_the_memory_node_does_not_bind_is_said(node: RawNode) -> None:
    stats = numa_stats(RdmaMedium(node.address))
    assert (stats.numa_node, stats.numa_bound, stats.numa_reason) == (None, False, "")
    with pytest.warns(NumaWarning, match="start it with --numa-node 0"):
        medium = RdmaMedium(node.address, numa_node=0)
    stats = numa_stats(medium)
    assert (stats.numa_node, stats.numa_bound) == (0, False)
    assert "start it with --numa-node 0" in stats.numa_reason


@pytest.mark.parametrize("wanted", [0, 1000])
def test_a_node_binds_its_memory_or_says_why_not(tmp_path: Path, wanted: int) -> None:
    with start_node(tmp_path / "n.sock", MIB, "--numa-node", str(wanted)) as node:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stats = numa_stats(RdmaMedium(str(tmp_path / "n.sock")))
        assert stats.numa_node == wanted
        assert stats.numa_bound == (not caught) == (stats.numa_reason == "")
        maps = Path(f"/proc/{node.pid}/numa_maps")
        if stats.numa_bound and maps.exists():
            line = next(ln for ln in maps.read_text().splitlines() if "emu-memory-node" in ln)
            assert "bind:0" in line
        assert wanted == 0 or not stats.numa_bound


def test_native_types_refuse_what_cannot_be() -> None:
    pair = _native.RingQueuePair(16, 4, 1.0)
    with pytest.raises(RuntimeError, match="not connected"):
        pair.wait()
    for arguments in ((16, 0, 1.0), (16, 4, 0.0)):
        with pytest.raises(ValueError, match="must be"):
            _native.RingQueuePair(*arguments)
