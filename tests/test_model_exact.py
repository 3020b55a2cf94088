"""Equal inputs give equal bytes, whatever else was computed and wherever rows were in between."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from emu.sac.chunked_prefill import PrefillState
from emu.sac.config import PRESETS
from emu.sac.model import DsaModel
from emu.sac.oracle import InMemoryRequest, OracleResult, run_oracle

CONFIG = replace(PRESETS["tiny"], num_layers=3, index_layers=(0, 2))  # with a shared selection


def prompt_of(seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab, (tokens,), generator=generator)


def prefill(
    model: DsaModel, prompt: torch.Tensor, *, loaded: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Rows of a whole prompt, the first tokens loaded instead of computed."""
    state = PrefillState(model, prompt.shape[0])
    parts = []
    if loaded is not None:
        state.load(loaded)
        parts.append(loaded)
    for start in range(state.length, prompt.shape[0], 64):
        parts.append(model.prefill_chunk(prompt[start : start + 64], start, state))
    return {name: np.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}


def assert_equal_rows(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape
        assert (one[name] == other[name]).all()


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(request: pytest.FixtureRequest) -> DsaModel:
    return DsaModel(CONFIG, request.param, seed=1)


def test_prefix_from_a_pool_gives_the_same_rows(model: DsaModel) -> None:
    prompt = prompt_of(0, 500)
    whole = prefill(model, prompt)
    for tokens in (64, 320, 448):
        prefix = {name: rows[:, :tokens] for name, rows in whole.items()}
        assert_equal_rows(prefill(model, prompt, loaded=prefix), whole)


def test_rows_do_not_depend_on_what_follows(model: DsaModel) -> None:
    prompt = prompt_of(0, 500)
    whole = prefill(model, prompt)
    for tokens in (1, 63, 64, 65, 333):  # ends inside a chunk, and other tokens follow
        other = torch.cat([prompt[:tokens], prompt_of(9, 100)])
        for shorter in (prompt[:tokens], other):
            rows = prefill(model, shorter)
            for name in whole:
                assert (rows[name][:, :tokens] == whole[name][:, :tokens]).all()
    changed = prompt.clone()
    changed[100] = (changed[100] + 1) % CONFIG.vocab
    rows = prefill(model, changed)
    assert (rows["kv"][:, :100] == whole["kv"][:, :100]).all()
    assert (rows["kv"][:, 100] != whole["kv"][:, 100]).any(axis=1).all()
    assert (rows["kv"][1:, 101:] != whole["kv"][1:, 101:]).any()


def decode_alternately(
    model: DsaModel, prompts: list[torch.Tensor], steps: int
) -> list[dict[str, np.ndarray]]:
    """Requests that join one after the other and take turns."""
    runs: list[InMemoryRequest] = []
    tokens: list[int] = []
    waiting = list(prompts)
    while waiting or any(len(run) < run.capacity for run in runs):
        if waiting:
            prompt = waiting.pop(0)
            runs.append(InMemoryRequest(model, prompt.shape[0] - 1 + steps))
            runs[-1].prefill(prompt[:-1])
            tokens.append(int(prompt[-1]))
        for number, run in enumerate(runs):
            if len(run) < run.capacity:
                tokens[number] = int(run.step(tokens[number])[0].argmax())
    return [run.rows for run in runs]


def test_decode_does_not_depend_on_the_batch(model: DsaModel) -> None:
    prompts = [prompt_of(seed, tokens) for seed, tokens in ((0, 300), (1, 130), (2, 65))]
    alone = [run_oracle(model, prompt, 8).rows for prompt in prompts]
    torch.mm(torch.randn(300, 300), torch.randn(300, 70))  # other work in this process
    for together, one in zip(decode_alternately(model, prompts, 8), alone, strict=True):
        assert_equal_rows(together, one)


def test_attention_reads_exactly_the_given_rows(model: DsaModel) -> None:
    result = run_oracle(model, prompt_of(0, 200), 1)
    x = model.embed(torch.tensor([7]))
    projection = model.project(0, x, torch.tensor([200]))
    rows = result.rows["kv"][0, 100:164].copy()
    out = model.attend(0, x, projection, 0, rows)
    unaligned = np.empty(rows.nbytes + 3, np.uint8)[3:].reshape(rows.shape)
    unaligned[:] = rows
    assert torch.equal(model.attend(0, x, projection, 0, unaligned), out)
    for byte in (0, rows.shape[1] - 1):  # first latent, last rope
        torn = rows.copy()
        torn[37, byte] ^= 0x40
        assert not torch.equal(model.attend(0, x, projection, 0, torn), out)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.2)])
def test_prefill_and_decode_agree(kv_dtype: str, tolerance: float) -> None:
    # Rounding may decide what a deeper layer selects, so single rows may differ more than most.
    model = DsaModel(replace(CONFIG, index_heads=16), kv_dtype, seed=1)
    prompt = prompt_of(0, 200)
    by_prefill = prefill(model, prompt)["kv"]
    run = InMemoryRequest(model, 200)
    run.prefill(prompt[:150])
    for token in prompt[150:].tolist():
        run.step(token)
    for layer in range(CONFIG.num_layers):
        ours = model.kv_codec.decode(run.rows["kv"][layer])
        theirs = model.kv_codec.decode(by_prefill[layer])
        error = (ours - theirs).abs().amax(dim=1)
        assert float(error.median()) <= tolerance / 10
        assert float(error.max()) <= tolerance


def digest(result: OracleResult) -> str:
    parts = [repr(result.tokens).encode()] + [rows.tobytes() for rows in result.rows.values()]
    return hashlib.blake2b(b"".join(parts)).hexdigest()


CHILD = """
import sys, torch
sys.path[:0] = sys.argv[1:]
torch.set_num_threads(2)
torch.mm(torch.randn(500, 33), torch.randn(33, 77))
import test_model_exact as t
print(t.digest(t.run_oracle(t.DsaModel(t.CONFIG, "fp8", seed=1), t.prompt_of(0, 300), 8)))
"""


def test_two_processes_give_the_same_bytes() -> None:
    here = digest(run_oracle(DsaModel(CONFIG, "fp8", seed=1), prompt_of(0, 300), 8))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *sys.path], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == here
    other = digest(run_oracle(DsaModel(CONFIG, "fp8", seed=2), prompt_of(0, 300), 8))
    assert other != here


def test_oracle_holds_every_row(model: DsaModel) -> None:
    prompt = prompt_of(0, 100)
    result = run_oracle(model, prompt, 5)
    layout = CONFIG.layout(model.kv_dtype)
    for component in layout.components:
        rows = result.rows[component.name]
        assert rows.shape == (len(component.layers), 104, component.row_bytes)
        assert (rows[:, :99] == prefill(model, prompt[:-1])[component.name]).all()
        assert rows.any(axis=2).all()
    assert len(result.tokens) == len(result.selections) == 5
    assert (result.selections[0][1] == result.selections[0][0]).all()  # layer 1 shares layer 0's
    one = run_oracle(model, prompt[:1], 3)
    assert one.rows["kv"].shape[1] == 3
    with pytest.raises(ValueError, match="empty prompt"):
        run_oracle(model, prompt[:0], 1)


def test_chunks_out_of_order_are_refused(model: DsaModel) -> None:
    state = PrefillState(model, 100)
    prompt = prompt_of(0, 200)
    with pytest.raises(ValueError, match="chunk of 64 tokens at 64"):
        model.prefill_chunk(prompt[64:128], 64, state)
    with pytest.raises(ValueError, match="chunk of 65 tokens at 0"):
        model.prefill_chunk(prompt[:65], 0, state)
    model.prefill_chunk(prompt[:30], 0, state)
    with pytest.raises(ValueError, match="only the last chunk short"):
        model.prefill_chunk(prompt[30:60], 30, state)
    full = PrefillState(model, 64)
    rows = model.prefill_chunk(prompt[:64], 0, full)
    with pytest.raises(ValueError, match="room for 64"):
        model.prefill_chunk(prompt[64:65], 64, full)
    with pytest.raises(ValueError, match="not a multiple of 64"):
        PrefillState(model, 64).load({name: part[:, :63] for name, part in rows.items()})


def test_output_varies_and_selections_have_locality() -> None:
    config = PRESETS["tiny"]
    result = run_oracle(DsaModel(config), prompt_of(0, 2048), 32)
    assert len(set(result.tokens)) > 16
    for layer in range(config.num_layers):
        sets = [set(step[layer].tolist()) for step in result.selections]
        shared = [len(a & b) / config.top_k for a, b in pairwise(sets)]
        assert 0.05 < float(np.mean(shared)) < 0.9
        assert len(set().union(*sets)) > config.hot_buffer
