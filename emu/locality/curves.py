"""Miss counts for the serving simulator: sampled layers of generated streams, run through the exact rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from emu.locality.model import FITTED, LocalityModel, StreamSpec, index_stream, sample_layers
from emu.locality.policies import Buffer, misses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WARM_STEPS = 24
"""Steps until a hot buffer that began empty misses at its steady rate."""
SAMPLED_STEPS = 96
SAMPLED_LAYERS = 6


@dataclass(frozen=True, slots=True)
class MissCurves:
    """Misses per step of sampled streams, and which stream each layer of each request takes.

    Attributes:
        rows, runs: int32 [streams, steps], rows missed and contiguous runs among them.
        warm_steps: steps that are taken once; the later ones go round and round from the request's phase.
        stream, phase: int32 [requests, layers].
    """

    rows: NDArray[np.int32]
    runs: NDArray[np.int32]
    warm_steps: int
    stream: NDArray[np.int32]
    phase: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """What curves are wanted.

    Attributes:
        contexts: rows that each request has before its first step.
        anchors: for each layer, the layer whose selection it uses.
        top_k, slots: of the hot buffer.
        seed: decides streams and phases.
        model: of the streams.
        policy: replacement.
    """

    contexts: tuple[int, ...]
    anchors: tuple[int, ...]
    top_k: int
    slots: int
    seed: int = 0
    model: LocalityModel = FITTED
    policy: str = "lru"


def miss_curves(spec: CurveSpec) -> MissCurves:
    """Curves for every request and layer of a simulation.

    Contexts are sampled on a grid (two per octave), layers evenly over the layers that have an indexer: a layer takes
    the nearest sampled one, and each request enters its streams at a phase of its own.
    """
    own = sorted(set(spec.anchors))
    sampled = sample_layers(own, SAMPLED_LAYERS)
    nearest = [min(range(len(sampled)), key=lambda i: abs(sampled[i] - a)) for a in spec.anchors]
    grid = sorted({_on_grid(c, spec) for c in spec.contexts})
    rows, runs = [], []
    for context in grid:
        for layer in sampled:
            made = _sample(
                spec.model,
                context,
                spec.top_k,
                len(spec.anchors),
                layer,
                spec.seed,
                Buffer(spec.slots, spec.policy, spec.seed),
            )
            rows.append(made[0])
            runs.append(made[1])
    random = np.random.default_rng(spec.seed)
    steady = SAMPLED_STEPS - WARM_STEPS
    place = np.array([grid.index(_on_grid(c, spec)) for c in spec.contexts], np.int32)
    phase = random.integers(0, steady, (len(spec.contexts), len(spec.anchors)), np.int32)
    phase = phase[:, list(spec.anchors)]  # a layer that shares a selection misses the same rows
    stream = place[:, None] * len(sampled) + np.array(nearest, np.int32)[None, :]
    return MissCurves(
        np.stack(rows),
        np.stack(runs),
        WARM_STEPS,
        stream.astype(np.int32),
        np.ascontiguousarray(phase),
    )


def exact_curves(
    rows: Sequence[NDArray[np.int32]], runs: Sequence[NDArray[np.int32]]
) -> MissCurves:
    """Curves of recorded misses, int32 [layers, steps] for each request: every step is its own."""
    layers = rows[0].shape[0]
    steps = max(r.shape[1] for r in rows) + 1
    table = np.zeros((2, len(rows) * layers, steps), np.int32)
    for request, pair in enumerate(zip(rows, runs, strict=True)):
        for kind, values in enumerate(pair):
            table[kind, request * layers : (request + 1) * layers, : values.shape[1]] = values
    stream = np.arange(len(rows) * layers, dtype=np.int32).reshape(len(rows), layers)
    return MissCurves(
        np.ascontiguousarray(table[0]),
        np.ascontiguousarray(table[1]),
        steps - 1,
        stream,
        np.zeros_like(stream),
    )


def _on_grid(context: int, spec: CurveSpec) -> int:
    """The nearest of two contexts per octave; what fits the hot buffer stays as it is."""
    if context <= spec.slots + 1:
        return context
    return max(spec.slots + 2, round(math.pow(2.0, round(2 * math.log2(context)) / 2)))


@lru_cache(maxsize=512)
def _sample(
    model: LocalityModel,
    context: int,
    top_k: int,
    layers: int,
    layer: int,
    seed: int,
    buffer: Buffer,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    stream = index_stream(model, StreamSpec(context + 1, top_k, SAMPLED_STEPS, layers, seed), layer)
    made = misses(stream, context + 1, buffer)
    return made.rows, made.runs
