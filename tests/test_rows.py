"""Rows between a mapped device and the caller's buffers, against plain numpy arithmetic."""

from __future__ import annotations

import mmap
import os
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu import _native

BLOCK = 64
OFFSET = 4096
ROW_BYTES = [132, 656, 1152]


def shared_memory(nbytes: int) -> np.ndarray:
    """Uint8 [nbytes] over a memfd, as a device file is mapped."""
    fd = os.memfd_create("rows")
    os.ftruncate(fd, nbytes)
    mapped = mmap.mmap(fd, nbytes)
    os.close(fd)
    return np.frombuffer(mapped, np.uint8)


def filled(num_blocks: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    memory = shared_memory(OFFSET + num_blocks * BLOCK * row_bytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)
    return memory


def row_numbers(blocks: np.ndarray, prompt_tokens: int, tokens: np.ndarray) -> np.ndarray:
    """The rule of the block table, written a second time and without the native core."""
    prompt_blocks = -(-prompt_tokens // BLOCK)
    appended = tokens >= prompt_tokens
    t = np.where(appended, tokens - prompt_tokens, tokens)
    entry = t // BLOCK + np.where(appended, prompt_blocks, 0)
    return blocks[entry].astype(np.int64) * BLOCK + t % BLOCK


def as_rows(memory: np.ndarray, row_bytes: int) -> np.ndarray:
    return memory[OFFSET:].reshape(-1, row_bytes)


def tokens_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, np.ndarray]:
    """(prompt tokens, capacity, block numbers in a random order)."""
    prompt = draw(st.integers(0, 300))
    append_blocks = draw(st.integers(0, 3))
    count = -(-prompt // BLOCK) + append_blocks
    blocks = draw(st.permutations(range(12)))[:count]
    return prompt, prompt + append_blocks * BLOCK, np.array(blocks, np.int32)


@settings(deadline=None)
@given(data=st.data(), request_=requests(), row_bytes=st.sampled_from(ROW_BYTES))
def test_gather_copies_exactly_the_rows_asked_for(data, request_, row_bytes):
    prompt, capacity, blocks = request_
    memory = filled(12, row_bytes)
    tables = _native.RowTables(BLOCK, 2)
    slot = tables.add(blocks, prompt, 0, capacity)
    valid = st.integers(-1, capacity - 1) if capacity else st.just(-1)
    tokens = np.array([data.draw(st.lists(valid, min_size=5, max_size=5))], np.int32)
    target = np.array([data.draw(st.permutations(range(8)))[:5]], np.int32)
    out = np.full((8, row_bytes), 7, np.uint8)
    expected = out.copy()
    kept = tokens[0] >= 0
    expected[target[0][kept]] = as_rows(memory, row_bytes)[
        row_numbers(blocks, prompt, tokens[0][kept])
    ]
    copied = _native.gather_rows(
        tables, memory, 1, OFFSET, row_bytes, np.array([slot]), tokens, out, target
    )
    assert copied == kept.sum()
    np.testing.assert_array_equal(out, expected)


@settings(deadline=None)
@given(
    data=st.data(),
    request_=requests(),
    row_bytes=st.sampled_from(ROW_BYTES),
    nontemporal=st.booleans(),
)
def test_scatter_writes_exactly_its_rows_and_advances_one_region(
    data, request_, row_bytes, nontemporal
):
    prompt, capacity, blocks = request_
    memory = filled(12, row_bytes)
    tables = _native.RowTables(BLOCK, 2)
    length = data.draw(st.integers(0, capacity))
    slot = tables.add(blocks, prompt, 0, length)
    start = data.draw(st.integers(0, length))
    n = data.draw(st.integers(0, capacity - start))
    rows = np.random.default_rng(1).integers(0, 256, (1, n, row_bytes), np.uint8)
    expected = memory.copy()
    as_rows(expected, row_bytes)[row_numbers(blocks, prompt, np.arange(start, start + n))] = rows[0]
    written = _native.scatter_rows(
        tables,
        memory,
        1,
        OFFSET,
        row_bytes,
        np.array([slot]),
        np.array([start], np.int32),
        rows,
        nontemporal,
    )
    assert written == n
    np.testing.assert_array_equal(memory, expected)
    assert tables.length(slot, 1) == max(length, start + n)
    assert tables.length(slot, 0) == tables.min_length(slot) == length


def scatter(tables, memory, slots, start, n, row_bytes=132):
    rows = np.zeros((len(slots), n, row_bytes), np.uint8)
    return _native.scatter_rows(
        tables,
        memory,
        0,
        OFFSET,
        row_bytes,
        np.array(slots),
        np.array(start, np.int32),
        rows,
        False,
    )


@pytest.mark.parametrize(
    ("start", "n", "token"),
    [(101, 1, 101), (63, 1, 63), (-1, 1, -1), (100, 31, 130)],
    ids=["gap", "shared", "negative", "past capacity"],
)
def test_scatter_refuses_what_may_not_be_written_and_writes_nothing(start, n, token):
    memory = filled(5, 132)
    before = memory.copy()
    tables = _native.RowTables(BLOCK, 1)
    good = tables.add(np.array([0, 4], np.int32), 0, 0, 0)
    bad = tables.add(np.array([1, 2, 3], np.int32), 100, 64, 100, 30)
    with pytest.raises(_native.TokenFault) as caught:
        scatter(tables, memory, [good, bad], [0, start], n)
    assert caught.value.args == (bad, token, 100)
    assert isinstance(caught.value, IndexError)
    np.testing.assert_array_equal(memory, before)
    assert tables.length(good, 0) == 0


def test_appends_fill_the_reserved_blocks_to_the_last_token():
    memory = filled(4, 132)
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(np.array([1, 2, 3], np.int32), 100, 64, 100)
    assert tables.capacity(slot) == 164
    assert scatter(tables, memory, [slot], [100], 64) == 64
    assert tables.length(slot, 0) == 164


def test_a_bad_token_is_refused_before_the_first_byte_is_copied():
    memory = filled(4, 656)
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(np.array([0, 1], np.int32), 100, 0, 100)
    out = np.full((2, 656), 9, np.uint8)
    with pytest.raises(_native.TokenFault) as caught:
        _native.gather_rows(
            tables, memory, 0, OFFSET, 656, np.array([slot]), tokens_of([3, 100]), out
        )
    assert caught.value.args == (slot, 100, 100)
    with pytest.raises(_native.TokenFault):
        _native.gather_rows(
            tables, memory, 0, OFFSET, 656, np.array([slot]), tokens_of([3, -2]), out
        )
    with pytest.raises(IndexError):
        _native.gather_rows(
            tables,
            memory,
            0,
            OFFSET,
            656,
            np.array([slot]),
            tokens_of([3, 4]),
            out,
            tokens_of([0, 2]),
        )
    with pytest.raises(IndexError):
        _native.gather_rows(
            tables,
            memory,
            0,
            OFFSET,
            656,
            np.array([slot]),
            tokens_of([3, 4]),
            out,
            tokens_of([0, -1]),
        )
    assert (out == 9).all()


def test_a_block_past_the_end_of_the_memory_is_refused():
    memory = filled(4, 656)
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(np.array([0, 4], np.int32), 128, 0, 128)
    out = np.zeros((2, 656), np.uint8)
    with pytest.raises(IndexError):
        _native.gather_rows(
            tables, memory, 0, OFFSET, 656, np.array([slot]), tokens_of([3, 64]), out
        )
    with pytest.raises(IndexError):
        scatter(tables, memory, [slot], [100], 2, 656)
    assert not out.any()


def test_a_removed_slot_is_stale_even_when_its_place_was_taken_again():
    tables = _native.RowTables(BLOCK, 1)
    old = tables.add(np.array([0], np.int32), 10, 0, 10)
    tables.remove(old)
    new = tables.add(np.array([0], np.int32), 20, 0, 20)
    assert old != new
    assert tables.length(new, 0) == 20
    for call in (tables.remove, tables.capacity, tables.min_length):
        with pytest.raises(_native.SlotFault) as caught:
            call(old)
        assert caught.value.args == (old,)
        assert isinstance(caught.value, KeyError)
    with pytest.raises(_native.SlotFault):
        tables.length(-1, 0)


@pytest.mark.parametrize(
    ("blocks", "prompt", "shared", "length", "append"),
    [
        ([0], 65, 0, 0, -1),
        ([0], 64, 65, 0, -1),
        ([0], 64, 0, 65, -1),
        ([0], 64, 0, -1, -1),
        ([-1], 64, 0, 0, -1),
        ([0], -1, 0, 0, -1),
        ([0, 1], 64, 0, 0, 65),
        ([0, 1], 64, 0, 0, -2),
        ([0, 1], 64, 0, 75, 10),
    ],
)
def test_tables_refuse_a_request_that_cannot_be(blocks, prompt, shared, length, append):
    tables = _native.RowTables(BLOCK, 1)
    with pytest.raises(ValueError, match=r"block|length"):
        tables.add(np.array(blocks, np.int32), prompt, shared, length, append)


def test_lengths_and_shared_tokens_can_be_set():
    tables = _native.RowTables(BLOCK, 3)
    slot = tables.add(np.array([0, 1], np.int32), 64, 0, 0)
    tables.set_length(slot, 128)
    assert [tables.length(slot, r) for r in range(3)] == [128] * 3
    with pytest.raises(ValueError, match="length"):
        tables.set_length(slot, 129)
    tables.set_shared(slot, 2**31 - 1)  # past the prompt: appended tokens are closed too
    with pytest.raises(ValueError, match="shared"):
        tables.set_shared(slot, -1)
    with pytest.raises(ValueError, match="region"):
        tables.length(slot, 3)


def test_arrays_of_another_dtype_or_stride_are_refused_not_converted():
    memory = filled(4, 132)
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(np.array([0], np.int32), 64, 0, 64)
    out = np.zeros((4, 132), np.uint8)
    slots, tokens = np.array([slot]), tokens_of([1, 2])
    for bad in (
        (slots, tokens.astype(np.int64), out),
        (slots, tokens, np.zeros((4, 264), np.uint8)[:, ::2]),
        (slots.astype(np.int32), tokens, out),
    ):
        with pytest.raises(TypeError):
            _native.gather_rows(tables, memory, 0, OFFSET, 132, *bad)
    memory.flags.writeable = False
    assert _native.gather_rows(tables, memory, 0, OFFSET, 132, slots, tokens, out) == 2
    with pytest.raises(TypeError):
        scatter(tables, memory, [slot], [0], 1)
    with pytest.raises(ValueError, match="row_bytes"):
        _native.gather_rows(tables, memory, 0, OFFSET, 64, slots, tokens, out)


@settings(deadline=None)
@given(request_=requests(), row_bytes=st.sampled_from(ROW_BYTES), data=st.data())
def test_write_back_and_invalidation_cover_every_line_of_the_rows(request_, row_bytes, data):
    prompt, capacity, blocks = request_
    memory = filled(12, row_bytes)
    before = memory.copy()
    tables = _native.RowTables(BLOCK, 1)
    slot = tables.add(blocks, prompt, 0, capacity)
    start = data.draw(st.integers(0, capacity))
    n = data.draw(st.integers(0, capacity - start))
    base = memory.ctypes.data + OFFSET
    first = base + row_numbers(blocks, prompt, np.arange(start, start + n)) * row_bytes
    spans = (first + row_bytes - 1) // 64 - first // 64 + 1
    lines = {int(a // 64) + i for a, s in zip(first, spans, strict=True) for i in range(s)}
    where = (tables, memory, 0, OFFSET, row_bytes, np.array([slot]))
    written = _native.writeback_rows(*where, np.array([start], np.int32), n)
    # Runs share no line inside a block; a prompt's last and an append's first block do not touch either.
    assert written == len(lines)
    tokens = np.arange(start, start + n, dtype=np.int32)[None]
    assert _native.invalidate_tokens(*where, tokens) == spans.sum()
    np.testing.assert_array_equal(memory, before)
    with pytest.raises(_native.TokenFault):
        _native.writeback_rows(*where, np.array([start], np.int32), capacity - start + 1)


def test_gather_is_about_as_fast_as_the_best_numpy_call():
    """One interleaved run, same memory, same indices. The aim is 1.05; the bound is wide for noisy machines."""
    row_bytes, tokens_total, k = 1152, 32768, 2048
    rng = np.random.default_rng(0)
    blocks = rng.permutation(tokens_total // BLOCK).astype(np.int32)
    memory = filled(len(blocks), row_bytes)
    tables = _native.RowTables(BLOCK, 1)
    slots = np.array([tables.add(blocks, tokens_total, 0, tokens_total)])
    out = np.zeros((k, row_bytes), np.uint8)
    view = as_rows(memory, row_bytes)
    ratios = []
    for turn in range(60):
        tokens = rng.permutation(tokens_total)[:k].astype(np.int32)
        rows = row_numbers(blocks, tokens_total, tokens)
        spent = {}
        for who in ("native", "numpy") if turn % 2 else ("numpy", "native"):
            rng.random(2 << 20)  # push the rows of the last turn out of the caches
            begin = time.perf_counter_ns()
            if who == "native":
                _native.gather_rows(tables, memory, 0, OFFSET, row_bytes, slots, tokens[None], out)
            else:
                np.take(view, rows, axis=0, out=out, mode="clip")
            spent[who] = time.perf_counter_ns() - begin
        ratios.append(spent["native"] / spent["numpy"])
    assert statistics.median(ratios) <= 1.25
