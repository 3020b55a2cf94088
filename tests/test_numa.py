"""NUMA binding: proved page by page, and never a silent success."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

from emu import _native, numa

PAGES = 40
NODE = numa.allowed_nodes()[0]


def shared_memory(pages: int = PAGES) -> np.ndarray:
    fd = os.memfd_create("numa")
    os.ftruncate(fd, pages * mmap.PAGESIZE)
    mapped = mmap.mmap(fd, pages * mmap.PAGESIZE)
    os.close(fd)
    return np.frombuffer(mapped, np.uint8)


@pytest.fixture
def can_bind() -> None:
    """Skips where this kernel or container does not let us bind at all."""
    memory = shared_memory(1)
    refused = _native.mbind(memory.ctypes.data, memory.nbytes, NODE)
    if not numa.nodes() or refused:
        pytest.skip(f"mbind is refused here: {os.strerror(refused)}")


def refused(array: np.ndarray, node: int, **options: bool) -> numa.NumaBinding:
    """The binding, after checking that it failed loudly: one warning with the reason and the remedy."""
    with pytest.warns(numa.NumaWarning) as caught:
        binding = numa.bind(array, node, **options)
    assert len(caught) == 1
    assert not binding.bound
    assert binding.reason
    assert binding.remedy
    assert binding.reason in str(caught[0].message)
    assert binding.remedy in str(caught[0].message)
    return binding


@pytest.mark.usefixtures("can_bind")
def test_shared_memory_is_bound_and_every_page_checked(monkeypatch):
    monkeypatch.setattr(numa, "_BATCH_PAGES", 16)  # the last batch is a part of one
    memory = shared_memory()
    memory[100:200] = 5
    before = memory.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        binding = numa.bind(memory, NODE)
    assert binding == numa.NumaBinding(NODE, True, pages_checked=PAGES)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.usefixtures("can_bind")
def test_private_memory_is_proved_only_when_it_may_be_touched_by_writing():
    memory = np.frombuffer(
        mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    assert "does not tell" in refused(memory, NODE).reason
    memory[3] = 9
    assert numa.bind(memory, NODE, fresh=True).pages_checked == PAGES
    assert memory[3] == 9
    assert memory.sum() == 9


def test_a_node_that_is_not_there_is_refused():
    binding = refused(shared_memory(1), 1 + max(numa.nodes(), default=0))
    assert "no node" in binding.reason or "no NUMA" in binding.reason


def test_a_node_outside_the_cpuset_is_refused(monkeypatch):
    monkeypatch.setattr(numa, "nodes", lambda: (0, 1, 7))
    monkeypatch.setattr(numa, "allowed_nodes", lambda: (0, 1))
    binding = refused(shared_memory(1), 7)
    assert "cpuset" in binding.reason
    assert "0, 1" in binding.remedy


def test_a_kernel_without_numa_is_said(monkeypatch):
    monkeypatch.setattr(numa, "_NODES", Path("/nonexistent"))
    assert numa.nodes() == ()
    assert "no NUMA" in refused(shared_memory(1), 0).reason


@pytest.mark.usefixtures("can_bind")
def test_pages_on_another_node_are_found(monkeypatch):
    def all_but_one(address: int, page_bytes: int, nodes: np.ndarray) -> int:
        nodes[:] = NODE
        nodes[-1] = NODE + 1
        return 0

    monkeypatch.setattr(_native, "page_nodes", all_but_one)
    binding = refused(shared_memory(), NODE)
    assert binding.reason == f"1 of {PAGES} pages lie on another node"
    assert binding.pages_checked == PAGES


@pytest.mark.usefixtures("can_bind")
def test_a_refused_verification_is_no_success(monkeypatch):
    monkeypatch.setattr(_native, "page_nodes", lambda *_: errno.ENOSYS)
    assert "move_pages" in refused(shared_memory(), NODE).reason


def test_an_array_that_does_not_begin_on_a_page_is_refused():
    assert "begins on a page" in refused(shared_memory()[64:], NODE).reason
    assert "begins on a page" in refused(shared_memory()[:0], NODE).reason


def test_the_native_calls_report_errno():
    assert _native.mbind(0, mmap.PAGESIZE, -1) == errno.EINVAL
    assert _native.mbind(0, mmap.PAGESIZE, 5000) == errno.EINVAL
    memory = shared_memory(1)
    assert _native.mbind(memory.ctypes.data + 1, 64, NODE) != 0


@pytest.mark.usefixtures("can_bind")
def test_each_page_is_asked_for_by_its_own_address():
    """The one page that nobody touched is found among more pages than one system call takes."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, 1100 * mmap.PAGESIZE, flags=private), np.uint8)
    touched = np.arange(1100) != 1050
    memory[np.flatnonzero(touched) * mmap.PAGESIZE] = 1
    nodes = np.full(1100, -99, np.int32)
    assert _native.page_nodes(memory.ctypes.data, mmap.PAGESIZE, nodes) == 0
    np.testing.assert_array_equal(nodes >= 0, touched)


def test_node_lists_of_the_kernel_are_read():
    assert numa.parse_node_list("0-1,3\n") == (0, 1, 3)
    assert numa.parse_node_list("\n") == ()


@pytest.mark.usefixtures("can_bind")
def test_a_seccomp_filter_as_containers_have_it_gives_a_warning_and_the_way_out():
    """A child denies itself mbind (system call 237), as Docker does without CAP_SYS_NICE."""
    program = textwrap.dedent("""
        import ctypes, mmap, struct, warnings
        import numpy as np
        from emu import numa
        code = [(0x20, 0, 0, 0), (0x15, 0, 1, 237), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
        header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(raw)))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            binding = numa.bind(np.frombuffer(mmap.mmap(-1, 8192), np.uint8), NODE)
        assert [w.category for w in caught] == [numa.NumaWarning]
        assert not binding.bound
        print(binding.reason, "|", binding.remedy)
    """).replace("NODE", str(NODE))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Operation not permitted" in done.stdout
    assert "SYS_NICE" in done.stdout
