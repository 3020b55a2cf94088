"""The indexer's scores and its top-k, against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emu.errors import UserError
from emu.sac.codec import IndexCodec
from emu.sac.config import PRESETS
from emu.sac.model import DsaModel
from emu.sac.selection import IndexKeys, index_scores, top_k, top_k_mask

# Few distinct values, both zeros among them: ties everywhere.
TIED = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0])


def brute_force(scores: np.ndarray, k: int) -> list[int]:
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    return [token for token in ranked if scores[token] > -np.inf][:k]


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=TIED), st.integers(1, 20))
def test_top_k_is_the_sorted_head(scores: np.ndarray, k: int) -> None:
    chosen = top_k(scores, k)
    wanted = brute_force(scores, k)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == wanted + [-1] * (k - len(wanted))


@given(hnp.arrays(np.float32, (5, 24), elements=TIED), st.integers(1, 30), st.integers(0, 19))
def test_mask_is_top_k_of_each_row(scores: np.ndarray, k: int, first: int) -> None:
    for row in range(5):
        scores[row, first + row + 1 :] = -np.inf  # causal
    mask = top_k_mask(scores, k)
    for row in range(5):
        assert np.flatnonzero(mask[row]).tolist() == sorted(brute_force(scores[row], k))


def test_scores_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 128, generator=generator)
    weights = torch.randn(3, 4, generator=generator)
    keys = torch.randn(50, 128, generator=generator)
    wanted = np.zeros((3, 50))
    for t in range(3):
        for s in range(50):
            for j in range(4):
                dot = float(queries[t, j].double() @ keys[s].double())
                wanted[t, s] += float(weights[t, j]) * max(0.0, dot)
    assert index_scores(queries, weights, keys).numpy() == pytest.approx(wanted, abs=1e-3)


def test_index_keys_grow_in_place() -> None:
    config = PRESETS["tiny"]
    generator = torch.Generator().manual_seed(0)
    rows = IndexCodec("bf16").encode(torch.randn(200, 128, generator=generator))
    whole, grown = IndexKeys(config, 200), IndexKeys(config, 1)
    whole.extend(rows)
    for start in range(0, 200, 7):
        grown.extend(rows[start : start + 7])
    assert len(grown) == 200
    assert torch.equal(grown.first(200), whole.first(200))
    with pytest.raises(ValueError, match="201 index keys wanted, 200 there"):
        grown.first(201)


def test_select_is_brute_force_over_visible_tokens() -> None:
    config = PRESETS["tiny"]
    model = DsaModel(config, seed=2)
    tokens = torch.arange(300) % config.vocab
    projection = model.project(0, model.embed(tokens), torch.arange(300))
    keys = IndexKeys(config, 300)
    keys.extend(projection.index_rows)
    for i in (0, 10, 63, 64, 299):
        chosen = model.select(0, projection, i, keys, i + 1)
        scores = index_scores(
            projection.index_queries[i : i + 1],
            projection.head_weights[i : i + 1],
            keys.first(i + 1),
        )[0].numpy()
        wanted = brute_force(scores, config.top_k)
        assert chosen.tolist() == wanted + [-1] * (config.top_k - len(wanted))


def test_a_layer_without_indexer_points_to_its_anchor() -> None:
    config = replace(PRESETS["tiny"], num_layers=3, index_layers=(0, 2))
    assert config.anchors == (0, 0, 2)
    model = DsaModel(config)
    projection = model.project(1, model.embed(torch.tensor([5])), torch.tensor([0]))
    assert projection.index_rows is None
    with pytest.raises(ValueError, match="use layer 0's selection"):
        model.select(1, projection, 0, IndexKeys(config, 1), 1)


@pytest.mark.parametrize("layers", [(), (1,), (0, 0), (1, 0), (0, 2)])
def test_index_layers_that_cannot_be_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="index_layers"):
        replace(PRESETS["tiny"], index_layers=layers)
