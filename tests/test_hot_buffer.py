"""The hot buffer's rule against a short reference, and the reference's mutants, which must not pass for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu import _native
from emu.sac.hot_buffer import HotBuffer, HotBufferShape

SLOTS, TOP_K = 8, 5
Step = tuple[list[int], int]  # the selected tokens (-1 pads), the newest token


class Reference:
    """HiSparse's rule for one layer and request, as facts and papers write it down."""

    def __init__(self, resident: int) -> None:
        resident = resident if resident <= SLOTS else 0
        self.token = [*range(resident), *[-1] * (SLOTS - resident)]
        self.order = [*range(resident, SLOTS), *range(resident)]

    def step(self, topk: list[int], newest: int) -> tuple[list[int], list[tuple[int, int]]]:
        wanted = [t for t in topk if t not in (-1, newest)]
        hits = [s for s in self.order if self.token[s] in wanted]
        evict = [s for s in self.order if self.token[s] not in wanted]
        where = {self.token[s]: s for s in hits}
        missing = [t for t in wanted if t not in where]
        victims = self.victims(evict, len(missing))
        self.order = self.next_order(evict, victims, hits)
        misses = list(zip(missing, victims, strict=True))
        for token, slot in misses:
            self.token[slot] = token
            where[token] = slot
        where |= {newest: SLOTS, -1: -1}
        return [where[t] for t in topk], misses

    def victims(self, evict: list[int], count: int) -> list[int]:
        return evict[:count]

    def next_order(self, evict: list[int], victims: list[int], hits: list[int]) -> list[int]:
        return [s for s in evict if s not in victims] + victims + hits


class FifoOrder(Reference):
    """A hit does not make a slot younger."""

    def next_order(self, evict: list[int], victims: list[int], hits: list[int]) -> list[int]:
        return [s for s in self.order if s not in victims] + victims


class NewestInTheLru(Reference):
    """The newest token takes a slot like any other."""

    def step(self, topk: list[int], newest: int) -> tuple[list[int], list[tuple[int, int]]]:
        return super().step(topk, -1)


class EvictsFromTheWrongEnd(Reference):
    """The youngest goes first."""

    def victims(self, evict: list[int], count: int) -> list[int]:
        return evict[len(evict) - count :]


class Native:
    """One request of one layer of the native buffer, among others, with the reference's interface."""

    LAYER, REQUEST = 1, 2

    def __init__(self, resident: int) -> None:
        self.buffer = _native.HotBuffer(2, 4, SLOTS, TOP_K)
        self.buffer.admit(self.REQUEST, resident)

    def step(self, topk: list[int], newest: int) -> tuple[list[int], list[tuple[int, int]]]:
        locs, tokens, slots = (np.full((1, len(topk)), 99, np.int32) for _ in range(3))
        count = self.buffer.resolve(
            self.LAYER,
            np.array([self.REQUEST], np.int32),
            np.array([topk], np.int32).reshape(1, -1),
            np.array([newest], np.int32),
            locs,
            tokens,
            slots,
        )
        assert (tokens[0, count:] == -1).all()
        assert (slots[0, count:] == -1).all()
        misses = zip(tokens[0, :count].tolist(), slots[0, :count].tolist(), strict=True)
        return locs[0].tolist(), list(misses)

    @property
    def order(self) -> list[int]:
        return self.buffer.order(self.LAYER, self.REQUEST)

    @property
    def token(self) -> list[int]:
        return self.buffer.slot_tokens(self.LAYER, self.REQUEST)


def first_difference(reference: Reference, resident: int, steps: list[Step]) -> str:
    """What the native buffer does otherwise than the reference; empty when they agree throughout."""
    native = Native(resident)
    for number, (topk, newest) in enumerate(steps):
        got, wanted = native.step(topk, newest), reference.step(topk, newest)
        if got != wanted:
            return f"step {number}: {got} instead of {wanted}"
        if (native.order, native.token) != (reference.order, reference.token):
            return f"step {number}: order {native.order} instead of {reference.order}"
    return ""


def selections(tokens: int) -> st.SearchStrategy[list[int]]:
    padded = st.integers(0, tokens - 1) | st.just(-1)
    return st.lists(padded, max_size=TOP_K, unique_by=lambda t: t if t >= 0 else object())


@settings(deadline=None)
@given(
    resident=st.integers(0, 2 * SLOTS),
    steps=st.lists(st.tuples(selections(20), st.integers(-1, 19)), max_size=12),
)
def test_the_rule_is_the_references(resident, steps):
    assert first_difference(Reference(resident), resident, steps) == ""


def decode(steps: int, seed: int = 0) -> list[Step]:
    """A decode whose selections drift: some tokens stay, some are new, the newest one is often selected."""
    rng = np.random.default_rng(seed)
    context, kept, found = 40, list(range(3)), []
    for newest in range(context, context + steps):
        fresh = [int(t) for t in rng.choice(context, 4, replace=False)]
        topk = [*list(dict.fromkeys([*kept, newest - 1, *fresh]))[: TOP_K - 1], newest]
        rng.shuffle(topk)
        found.append((topk, newest))
        kept = [t for t in topk if t != newest][:2]
    return found


@pytest.mark.parametrize("mutant", [FifoOrder, NewestInTheLru, EvictsFromTheWrongEnd])
def test_the_comparison_catches_the_mutant(mutant):
    steps = decode(30)
    assert first_difference(Reference(0), 0, steps) == ""
    assert first_difference(mutant(0), 0, steps) != ""


@pytest.mark.parametrize("mutant", [FifoOrder, EvictsFromTheWrongEnd])
def test_the_mutant_would_fetch_other_rows_not_only_keep_another_order(mutant):
    right, wrong = Reference(0), mutant(0)
    steps = decode(60)
    fetched = [[dict(r.step(*step)[1]).keys() for step in steps] for r in (right, wrong)]
    assert fetched[0] != fetched[1]


def test_a_context_within_the_slots_is_resident_and_grows_into_empty_slots():
    native = Native(SLOTS - 2)
    assert native.step([0, 3, 5], SLOTS - 2) == ([0, 3, 5], [])
    # Last step's newest token is an ordinary one now: fetched into an empty slot, evicting nobody.
    assert native.step([SLOTS - 2, 1], SLOTS - 1) == (
        [SLOTS - 2, 1],
        [(SLOTS - 2, SLOTS - 2)],
    )
    assert native.buffer.evictions == 0
    assert native.buffer.misses == 1
    assert native.buffer.hits == 4


def test_counters_tell_hits_misses_and_evictions():
    native, reference = Native(0), Reference(0)
    hits = misses = evictions = 0
    for topk, newest in decode(40):
        before = list(reference.token)
        _, missed = reference.step(topk, newest)
        native.step(topk, newest)
        misses += len(missed)
        hits += len(topk) - len(missed)
        evictions += sum(before[slot] != -1 for _, slot in missed)
    assert (native.buffer.hits, native.buffer.misses, native.buffer.evictions) == (
        hits,
        misses,
        evictions,
    )
    assert 0 < evictions < misses


@pytest.mark.parametrize(
    ("layer", "requests", "tokens", "match"),
    [
        (0, [0, 1], [[4, 5], [6, 6]], "twice in one row"),
        (0, [0, 1], [[4, 5], [6, -2]], "negative"),
        (0, [0, 0], [[4, 5], [6, 7]], "twice in one batch"),
        (0, [0, 3], [[4, 5], [6, 7]], "not admitted"),
        (0, [0, 4], [[4, 5], [6, 7]], "not admitted"),
        (2, [0, 1], [[4, 5], [6, 7]], "no such layer"),
        (0, [0], [[4, 5], [6, 7]], "differ in length"),
    ],
)
def test_a_refused_call_changes_nothing(layer, requests, tokens, match):
    buffer = _native.HotBuffer(2, 4, SLOTS, TOP_K)
    buffer.admit(0, 3)
    buffer.admit(1, 100)
    outputs = [np.zeros((2, 2), np.int32) for _ in range(3)]
    before = [(buffer.slot_tokens(0, r), buffer.order(0, r)) for r in (0, 1)]
    with pytest.raises(ValueError, match=match):
        buffer.resolve(
            layer,
            np.array(requests, np.int32),
            np.array(tokens, np.int32),
            np.full(len(requests), -1, np.int32),
            *outputs,
        )
    assert [(buffer.slot_tokens(0, r), buffer.order(0, r)) for r in (0, 1)] == before
    assert (buffer.hits, buffer.misses, buffer.evictions) == (0, 0, 0)


def test_a_released_index_starts_anew():
    buffer = _native.HotBuffer(1, 1, SLOTS, TOP_K)
    buffer.admit(0, SLOTS)
    buffer.release(0)
    with pytest.raises(ValueError, match="not admitted"):
        buffer.release(0)
    buffer.admit(0, SLOTS + 1)
    assert buffer.slot_tokens(0, 0) == [-1] * SLOTS


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match="at least top_k"):
        _native.HotBuffer(1, 1, 4, 5)


def test_rows_land_where_the_attention_looks_for_them():
    """The owner's rows, filled by hand from a pool of known rows, give the selected rows back in every layer."""
    shape = HotBufferShape(num_layers=2, max_requests=3, slots=SLOTS, top_k=TOP_K, row_bytes=4)
    hot = HotBuffer(shape, np.zeros(shape.nbytes, np.uint8))
    pool = np.random.default_rng(0).integers(0, 256, (2, 3, 200, 4), np.uint8)
    requests = np.array([2, 0], np.int32)
    for request in requests.tolist():
        assert not hot.admit(request, 40)
    for topk, newest in decode(40):
        tokens = np.array([topk, topk[::-1]], np.int32)
        tokens[1, 0] = -1
        for layer in range(2):
            for request in requests.tolist():
                hot.rows(layer)[hot.newest_row(request)] = pool[layer, request, newest]
            step = hot.resolve(layer, requests, tokens, np.full(2, newest, np.int32))
            assert (step.miss_rows >= 0).sum() == (step.miss_tokens >= 0).sum() == step.misses
            for b, request in enumerate(requests.tolist()):
                asked = step.miss_tokens[b] >= 0
                hot.rows(layer)[step.miss_rows[b][asked]] = pool[
                    layer, request, step.miss_tokens[b][asked]
                ]
            for b, request in enumerate(requests.tolist()):
                real = tokens[b] >= 0
                np.testing.assert_array_equal(
                    hot.request_rows(layer, request)[step.locs[b][real]],
                    pool[layer, request, tokens[b][real]],
                )
                assert (step.locs[b][~real] == -1).all()
    assert hot.misses > 0
    assert hot.evictions > 0
    assert hot.hits > 0
    assert hot.admit(2, SLOTS)
    hot.release(2)


def test_the_owner_refuses_what_does_not_fit():
    shape = HotBufferShape(num_layers=1, max_requests=1, slots=SLOTS, top_k=TOP_K, row_bytes=4)
    with pytest.raises(ValueError, match="buffer"):
        HotBuffer(shape, np.zeros(shape.nbytes - 1, np.uint8))
    hot = HotBuffer(shape, np.zeros(shape.nbytes, np.uint8))
    hot.admit(0, 0)
    one = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="tokens"):
        hot.resolve(0, one, np.arange(TOP_K + 1, dtype=np.int32)[None], one)
