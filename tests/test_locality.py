"""Index streams: what the generator was fitted to, and the policies against references in plain Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cli.main import cli
from emu.errors import UserError
from emu.locality.curves import CurveSpec, miss_curves
from emu.locality.model import LocalityModel, StreamSpec, activity, index_stream
from emu.locality.policies import POLICIES, Buffer, misses
from emu.locality.recorded import Recorder, Recording, watch_transformers

if TYPE_CHECKING:
    from pathlib import Path

SMALL = StreamSpec(context=2000, top_k=64, steps=60, layers=4)


def locality(*arguments: str) -> dict:
    run = CliRunner().invoke(
        cli, ["trace", "locality", "--json", *arguments], catch_exceptions=False
    )
    assert run.exit_code == 0
    return json.loads(run.stdout)


@pytest.mark.slow
def test_the_generator_meets_what_it_was_fitted_to() -> None:
    at_k = locality(
        "--model", "glm-5.1", "--context", "128K", "--hot-buffer", "2048", "--layers", "6"
    )
    at_2k = locality(
        "--model", "glm-5.1", "--context", "128K", "--hot-buffer", "4096", "--layers", "6"
    )
    assert at_k["miss_rate"] == pytest.approx(0.30, abs=0.015)
    assert at_2k["miss_rate"] == pytest.approx(0.134, abs=0.01)
    assert at_2k["kv_touched_fraction"] == pytest.approx(0.21, abs=0.01)
    rates = [layer["miss_rate"] for layer in at_2k["layers"]]
    assert len(rates) == 6
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[-1]


@pytest.mark.slow
def test_policies_order_as_published() -> None:
    rates = {
        policy: locality(
            "--context", "32K", "--policy", policy, "--layers", "2", "--output-tokens", "300"
        )["miss_rate"]
        for policy in POLICIES
    }
    assert rates["belady"] < rates["lru"] < min(rates["fifo"], rates["random"])


def test_a_stream_selects_each_row_once_and_none_that_does_not_exist() -> None:
    for layer in range(SMALL.layers):
        stream = index_stream(LocalityModel(), SMALL, layer)
        for step, row in enumerate(stream):
            assert len(set(row.tolist())) == SMALL.top_k
            assert row.min() >= 0
            assert row.max() == SMALL.context + step - 1


def test_the_seed_decides_and_layers_differ() -> None:
    first, again = (index_stream(LocalityModel(), SMALL, 1) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, index_stream(LocalityModel(), SMALL, 2))
    other = StreamSpec(SMALL.context, SMALL.top_k, SMALL.steps, SMALL.layers, seed=1)
    assert not np.array_equal(first, index_stream(LocalityModel(), other, 1))


def test_a_context_of_no_more_than_top_k_is_selected_whole() -> None:
    stream = index_stream(LocalityModel(), StreamSpec(10, 16, 4, 1), 0)
    assert [sorted(row[row >= 0].tolist()) for row in stream] == [
        list(range(10 + i)) for i in range(4)
    ]
    # The row that was the newest is read once, after its write-back.
    assert misses(stream, 10, Buffer(16)).rows.tolist() == [0, 1, 1, 1]


def test_no_spread_makes_all_layers_alike() -> None:
    assert {activity(LocalityModel(spread=0), layer, 9) for layer in range(9)} == {1.0}
    mean = sum(activity(LocalityModel(spread=0.6), layer, 9) for layer in range(9)) / 9
    assert mean == pytest.approx(1.0)


# -- policies, against the shortest code that says what they do ---------------------------------------------------


def reference(stream: np.ndarray, context: int, slots: int, policy: str) -> list[int]:
    held: list[int] = list(range(context - 1)) if context - 1 <= slots else []
    counts = []
    for step, row in enumerate(stream.tolist()):
        chosen = [t for t in row if t >= 0]
        old = [t for t in chosen if t != context + step - 1]
        missed = [t for t in old if t not in held]
        for _ in range(max(0, len(held) + len(missed) - slots)):
            candidates = [t for t in held if t not in chosen]
            if policy == "belady":
                later = stream[step + 1 :].tolist()

                def next_use(token: int, later: list[list[int]] = later) -> int:
                    return next((i for i, r in enumerate(later) if token in r), len(later))

                victim = max(candidates, key=next_use)
            else:
                victim = candidates[0]
            held.remove(victim)
        counts.append(len(missed))
        if policy == "lru":
            hits = [t for t in held if t in old]
            held = [t for t in held if t not in old] + missed + hits
        else:
            held += missed
    return counts


streams = st.lists(
    st.lists(st.integers(0, 24), min_size=4, max_size=4, unique=True), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(streams, st.integers(4, 12))
def test_policies_against_the_reference(rows: list[list[int]], slots: int) -> None:
    context = 40
    stream = np.array(rows, np.int32)
    for policy in ("lru", "belady"):
        expected = reference(stream, context, slots, policy)
        assert sum(misses(stream, context, Buffer(slots, policy)).rows) == sum(expected)
    fifo = misses(stream, context, Buffer(slots, "fifo")).rows
    # Rows loaded in one step are of one age: only the total of the first steps is told by the rule.
    assert fifo[0] == 4
    best = misses(stream, context, Buffer(slots, "belady")).rows.sum()
    for policy in POLICIES:
        assert misses(stream, context, Buffer(slots, policy)).rows.sum() >= best


def test_a_buffer_below_top_k_and_an_unknown_policy_are_refused() -> None:
    stream = index_stream(LocalityModel(), SMALL, 0)
    with pytest.raises(UserError, match="cannot hold"):
        misses(stream, SMALL.context, Buffer(63))
    with pytest.raises(UserError, match="lru"):
        Buffer(64, "lur")
    with pytest.raises(UserError, match="background"):
        LocalityModel(background=1.5)


def test_curves_give_shared_layers_the_same_misses() -> None:
    curves = miss_curves(CurveSpec((3000, 5000), (0, 0, 0, 3, 3), 64, 128))
    assert curves.stream.shape == (2, 5)
    assert (curves.stream[:, 0] == curves.stream[:, 2]).all()
    assert (curves.phase[:, 3] == curves.phase[:, 4]).all()
    assert curves.rows[:, 0].max() <= 64
    assert (curves.runs <= curves.rows).all()


# -- recordings ---------------------------------------------------------------------------------------------------


def test_a_recording_gives_the_figures_of_its_stream(tmp_path: Path) -> None:
    recorder = Recorder()
    made = index_stream(LocalityModel(), SMALL, 0)
    for step, row in enumerate(made):
        recorder.observe(7, 3, SMALL.context + step, row)
    path = tmp_path / "r.npz"
    recorder.recordings()[7].write(path)
    figures = locality("--recorded", str(path), "--hot-buffer", "96")
    expected = misses(made, SMALL.context, Buffer(96)).rows[16:].sum() / (44 * 64)
    assert figures["miss_rate"] == pytest.approx(expected, abs=1e-6)
    assert [layer["layer"] for layer in figures["layers"]] == [3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": np.zeros((1, 2, 4), np.int64)}, "int32"),
        ({"tokens": np.zeros((1, 2, 4), np.int32)}, "twice"),
        ({"tokens": np.full((1, 2, 4), 99, np.int32)}, "newer"),
        ({"layers": np.zeros(2, np.int64)}, "layers"),
        ({"context": np.int64(0)}, "context"),
    ],
)
def test_a_bad_recording_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    good = {
        "tokens": np.arange(8, dtype=np.int32).reshape(1, 2, 4),
        "context": np.int64(20),
        "layers": np.zeros(1, np.int64),
    }
    path = tmp_path / "r.npz"
    np.savez(path, **{**good, **change})
    with pytest.raises(UserError, match=words):
        Recording.read(path)
    for content in (b"", b"PK\x03\x04 torn"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a recording"):
            Recording.read(path)


@pytest.mark.filterwarnings("default")  # transformers' warnings are not ours
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_transformers_modules_are_recorded(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from test_model_transformers import CONFIGS, load_transformers

    from emu.sac.model import DsaModel

    model = load_transformers(name, DsaModel(CONFIGS[name], "fp32", 0))
    recorder = Recorder()
    handles = watch_transformers(model, recorder)
    with torch.no_grad():
        out = model(torch.arange(1, 101)[None] % 50, use_cache=True)
        for token in (3, 4, 5):
            out = model(
                torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
            )
    for handle in handles:
        handle.remove()
    recording = recorder.recordings()[0]
    recording.check("here")
    assert recording.context == 101
    assert recording.tokens.shape[1] == 3


def test_a_model_without_indexers_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UserError, match="no Indexer"):
        watch_transformers(torch.nn.Linear(2, 2), Recorder())
