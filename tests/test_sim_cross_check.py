"""The simulator against the engine that moves every byte, fed with the selections that the engine made."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import sac_harness
from sac_harness import Engine, requests

from emu.locality.curves import exact_curves
from emu.locality.policies import Buffer, misses
from emu.sac.designs import DESIGNS
from emu.sac.plan import RunSpec
from emu.sim.models import ModelShape
from emu.sim.simulate import RECORDS, Outcome, SimSpec, simulate

if TYPE_CHECKING:
    from pathlib import Path

    from emu.sac.instance import Decoded

BASE = RunSpec(gpus=2, devices=2, concurrency=3)
CONFIGURATIONS = {
    "closed loop": (BASE, requests((400, 5), (350, 6), (600, 4), (130, 5), (90, 3))),
    "one GPU, FP8, prefill": (
        replace(BASE, gpus=1, devices=1, concurrency=2, kv_dtype="fp8", round=1),
        requests((700, 4), (600, 5), (300, 6), shared=1),
    ),
    "arrivals, little GPU memory": (
        replace(BASE, gpus=3, concurrency=5, arrivals="trace", hbm_bytes=1 << 21),
        [
            replace(r, arrival_ms=0.7 * i)
            for i, r in enumerate(requests((300, 7), (400, 3), (500, 5), (200, 4), (350, 6)))
        ],
    ),
}


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path):
    spec, trace = CONFIGURATIONS[request.getfixturevalue("name")]
    made = Engine.make(tmp_path, spec, trace)
    made.prefill()
    yield made
    made.close()


def shape_of(engine: Engine) -> ModelShape:
    config = engine.model.config
    return ModelShape(
        "tiny",
        config.num_layers,
        tuple(range(config.num_layers)),
        config.index_layers,
        config.top_k,
        config.max_context,
        "the engine's own",
    )


def simulated(engine: Engine, design: str) -> Outcome:
    """The same requests in the simulator; rows missed come from the recorded selections, by the exact rule."""
    config, spec = engine.model.config, engine.spec
    rows, runs = [], []
    for _, recording in sorted(engine.recorder.recordings().items()):
        streams = [
            misses(tokens, recording.context, Buffer(config.hot_buffer))
            for tokens in recording.tokens
        ]
        rows.append(np.stack([s.rows for s in streams]))
        runs.append(np.stack([s.runs for s in streams]))
    run = replace(spec, top_k=config.top_k, hot_buffer=config.hot_buffer)
    sim = SimSpec(run, shape_of(engine), one_pool=DESIGNS[design].prefetch_path != "")
    trace = [plan.request for plan in engine.plans]
    return simulate(sim, DESIGNS[design], trace, exact_curves(rows, runs))


def times(decoded: Decoded) -> list[list[int]]:
    return [r.token_ns for r in sorted(decoded.records, key=lambda r: r.number)]


@pytest.mark.parametrize("design", list(DESIGNS))
@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_every_token_has_the_same_time(
    engine: Engine, name: str, design: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over device files nobody packs: the bytes go unpacked, the time is that of the packed message.
    unpacked = {n: replace(d, packed=False) for n, d in DESIGNS.items()}
    monkeypatch.setattr(sac_harness, "DESIGNS", unpacked)
    decoded = engine.decode(design)
    outcome = simulated(engine, design)
    assert [t.tolist() for t in outcome.token_ns] == times(decoded)
    records = sorted(decoded.records, key=lambda r: r.number)
    column = {c: outcome.records[:, i].tolist() for i, c in enumerate(RECORDS)}
    assert column["arrived"] == [r.arrival_ns for r in records]
    assert column["attach_transfer_ns"] == [r.attach_transfer_ns for r in records]
    assert column["queue_ns"] == [r.queue_ns for r in records]
    assert [s.tolist() for s in outcome.stall_ns] == [r.stall_ns for r in records]
    if design != "hbm":
        assert column["rows_missed"] != [0] * len(records)
        assert sum(column["rows_missed"]) == decoded.misses
    use = engine.clock.utilisation()
    assert {n: v[1] for n, v in outcome.links.items()} == {n: u.nbytes for n, u in use.items()}
    assert {n: v[0] for n, v in outcome.links.items()} == {n: u.busy_ns for n, u in use.items()}
