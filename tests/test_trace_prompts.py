"""Prompts from hash ids, block hashes, and cutting: properties over arbitrary requests."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.errors import UserError
from emu.trace import BLOCK_TOKENS, Request, block_hashes, prompt_tokens, shape
from emu.trace.request import PRIVATE_IDS, blocks_of

VOCAB = 1 << 16


@st.composite
def requests(draw: st.DrawFn, ids: st.SearchStrategy[int] | None = None) -> Request:
    tokens = draw(st.integers(1, 5 * BLOCK_TOKENS))
    some_ids = st.one_of(st.integers(0, 3), st.integers(0, PRIVATE_IDS + 9)) if ids is None else ids
    blocks = draw(st.lists(some_ids, min_size=blocks_of(tokens), max_size=blocks_of(tokens)))
    return Request("r0", 0.0, tokens, draw(st.integers(1, 3000)), tuple(blocks))


def common_head(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@settings(deadline=None)
@given(requests(), requests(), st.integers(0, (1 << 64) - 1))
def test_prompts_are_equal_exactly_as_far_as_the_ids_are(a: Request, b: Request, seed: int) -> None:
    x, y = prompt_tokens(a, VOCAB, seed), prompt_tokens(b, VOCAB, seed)
    assert (x.dtype, x.shape, y.shape) == (np.int64, (a.input_tokens,), (b.input_tokens,))
    assert int(x.min()) >= 0
    assert int(x.max()) < VOCAB
    both = min(a.input_tokens, b.input_tokens)
    shared = common_head(a.hash_ids, b.hash_ids) * BLOCK_TOKENS
    assert np.array_equal(x[:shared][:both], y[:shared][:both])
    if both >= shared + 64:  # different ids: 64 equal draws of 2^16 do not happen
        assert not np.array_equal(x[shared : shared + 64], y[shared : shared + 64])


@settings(deadline=None)
@given(requests(st.integers(0, 3)), requests(st.integers(0, 3)))
def test_block_hashes_are_equal_exactly_as_far_as_the_prompts_are(a: Request, b: Request) -> None:
    x, y = prompt_tokens(a, VOCAB), prompt_tokens(b, VOCAB)
    hx, hy = block_hashes(x), block_hashes(y)
    assert (len(hx), len(hy)) == (a.input_tokens // 64, b.input_tokens // 64)
    for i, (one, other) in enumerate(zip(hx, hy, strict=False)):
        assert (one == other) == np.array_equal(x[: 64 * (i + 1)], y[: 64 * (i + 1)])


def test_block_hashes_are_the_documented_chain() -> None:
    tokens = np.arange(130, dtype=np.int64)
    first = hashlib.blake2b(tokens[:64].astype("<i8").tobytes(), digest_size=16).digest()
    second = hashlib.blake2b(first + tokens[64:128].astype("<i8").tobytes(), digest_size=16)
    assert block_hashes(tokens) == [first, second.digest()]
    assert block_hashes(tokens[:63]) == []
    assert len(block_hashes(tokens, block_tokens=13)) == 10


def test_a_block_is_splitmix64_of_its_id() -> None:
    """The published generator, in plain integers: what every machine must give."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert mix(gamma) == 0xE220A8397B1DCDAF  # the first output for seed 0, as published
    block = PRIVATE_IDS + 12345
    key = mix(7 + gamma)
    for word in (block & mask, block >> 64):
        key = mix(((key ^ word) + gamma) & mask)
    wanted = [mix((key + (i + 1) * gamma) & mask) % 1000 for i in range(300)]
    got = prompt_tokens(Request("r0", 0.0, 300, 1, (block,)), 1000, 7)
    assert got.tolist() == wanted


def test_tokens_cover_the_vocabulary_evenly() -> None:
    request = Request("r0", 0.0, 512 * 200, 1, tuple(range(200)))
    counts = np.bincount(prompt_tokens(request, 64), minlength=64)
    assert counts.sum() == 512 * 200
    chi2 = float(((counts - 1600) ** 2 / 1600).sum())
    assert 20 < chi2 < 140  # 63 degrees of freedom, fixed seed


def test_the_seed_changes_every_block_and_bad_arguments_are_refused() -> None:
    request = Request("r0", 0.0, 1024, 1, (1, 2))
    same = (prompt_tokens(request, VOCAB, 0) == prompt_tokens(request, VOCAB, 1)).mean()
    assert same < 0.01
    for vocab, seed in ((0, 0), (1 << 63, 0), (10, -1), (10, 1 << 64)):
        with pytest.raises(ValueError, match="wanted"):
            prompt_tokens(request, vocab, seed)


@settings(deadline=None)
@given(
    st.lists(requests(), max_size=5),
    st.one_of(st.none(), st.integers(1, 4000)),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_shaped_requests_fit_and_keep_their_heads(
    trace: list[Request], context: int | None, output: int | None, limit: int | None
) -> None:
    kept = trace[:limit]
    outputs = [output or r.output_tokens for r in kept]
    if context is not None and any(n >= context for n in outputs):
        with pytest.raises(UserError, match="no room for a prompt"):
            shape(trace, context=context, output_tokens=output, limit=limit)
        return
    shaped = shape(trace, context=context, output_tokens=output, limit=limit)
    assert [r.output_tokens for r in shaped] == outputs
    for before, after in zip(kept, shaped, strict=True):
        room = before.input_tokens if context is None else context - after.output_tokens
        assert after.input_tokens == min(before.input_tokens, room) >= 1
        assert (after.id, after.arrival_ms) == (before.id, before.arrival_ms)
        assert len(after.hash_ids) == blocks_of(after.input_tokens)
        head = prompt_tokens(before, VOCAB)[: after.input_tokens]
        assert np.array_equal(prompt_tokens(after, VOCAB), head)


@pytest.mark.parametrize("name", ["context", "output_tokens", "limit"])
@pytest.mark.parametrize("value", [0, -1])
def test_shape_refuses_figures_below_one(name: str, value: int) -> None:
    with pytest.raises(UserError, match="less than 1"):
        shape([], **{name: value})
