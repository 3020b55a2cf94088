"""Write-back, invalidation and non-temporal copies: lines, bytes, and that the caches really lose them."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu import _native

LINE = 64


def page_memory(nbytes: int) -> np.ndarray:
    """Uint8 [nbytes], page-aligned."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@settings(deadline=None)
@given(offset=st.integers(0, 500), nbytes=st.integers(0, 500))
def test_every_line_of_the_range_is_flushed_once_and_keeps_its_bytes(offset, nbytes):
    memory = page_memory(4096)
    memory[:] = np.arange(4096) % 251
    before = memory.copy()
    lines = len({byte // LINE for byte in range(offset, offset + nbytes)})
    assert _native.writeback(memory, offset, nbytes) == lines
    assert _native.invalidate(memory, offset, nbytes) == lines
    np.testing.assert_array_equal(memory, before)


@settings(deadline=None)
@given(to=st.integers(0, 130), start=st.integers(0, 130), nbytes=st.integers(0, 700))
def test_a_nontemporal_copy_is_exact_at_every_alignment(to, start, nbytes):
    memory = page_memory(4096)
    memory[:] = 7
    source = np.random.default_rng(nbytes).integers(0, 256, start + nbytes, np.uint8)
    expected = memory.copy()
    expected[to : to + nbytes] = source[start:]
    part_lines = _native.nontemporal_copy(memory[to : to + nbytes], source[start:])
    np.testing.assert_array_equal(memory, expected)
    whole = max(0, (to + nbytes) // LINE - -(-to // LINE))
    touched = len({byte // LINE for byte in range(to, to + nbytes)})
    assert part_lines == touched - whole


def test_ranges_past_the_memory_and_unlike_sizes_are_refused():
    memory = page_memory(4096)
    for call in (_native.writeback, _native.invalidate):
        with pytest.raises(IndexError):
            call(memory, 4000, 97)
        with pytest.raises(IndexError):
            call(memory, 4097, 0)
        with pytest.raises(TypeError):
            call(memory, -1, 1)
        assert call(memory, 4000, 96) == 2
    with pytest.raises(ValueError, match="size"):
        _native.nontemporal_copy(memory[:10], memory[20:31])
    memory.flags.writeable = False
    assert _native.invalidate(memory, 0, 64) == 1
    with pytest.raises(TypeError):
        _native.nontemporal_copy(memory[:10], memory[20:30])


def test_features_name_the_instructions_that_every_x86_64_has():
    features = _native.visibility_features()
    assert set(features) == {"clflush", "clflushopt", "clwb"}
    assert features["clflush"] is True
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith("flags")).split()
    for name, present in features.items():
        assert present == (name in flags)


def test_invalidated_lines_must_come_from_memory_again():
    """Reading a cached quarter MiB, against reading it right after its lines were dropped, interleaved."""
    memory = page_memory(256 << 10)
    memory[:] = 1
    ratios = []
    for _ in range(40):
        one_byte_a_line = memory[::LINE]
        spent = []
        for drop in (False, True):
            int(memory[::LINE].sum())
            if drop:
                _native.invalidate(memory, 0, memory.size)
            begin = time.perf_counter_ns()
            total = int(one_byte_a_line.sum())
            spent.append(time.perf_counter_ns() - begin)
            assert total == memory.size // LINE
        ratios.append(spent[1] / spent[0])
    assert statistics.median(ratios) > 1.2


def test_fences_keep_a_message_behind_its_flag():
    """The writer's fence stands between message and flag, the reader's between flag and message."""
    rounds = 300
    memory, length = page_memory(8192), 4096
    flag, answer = memory[4096:4104].view(np.int64), memory[4160:4168].view(np.int64)
    wrong = []

    def read() -> None:
        for turn in range(1, rounds + 1):
            while flag[0] != turn:
                time.sleep(0)
            _native.full_fence()
            if not (memory[:length] == turn % 251).all():
                wrong.append(turn)
            answer[0] = turn

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(1, rounds + 1):
        memory[:length] = turn % 251
        _native.store_fence()
        flag[0] = turn
        while answer[0] != turn:
            time.sleep(0)
    reader.join()
    assert wrong == []
