"""What `emu trace locality` reports."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.errors import UserError
from emu.locality.model import (
    FITTED,
    FITTED_TO,
    LocalityModel,
    StreamSpec,
    index_stream,
    sample_layers,
)
from emu.locality.policies import Buffer, Misses, misses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from emu.locality.recorded import Recording
    from emu.sim.models import ModelShape
    from emu.store import TokenIds

WARM_STEPS = 16
"""Steps that do not count: a hot buffer that begins empty misses everything at first."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to generate.

    Attributes:
        shape: the model.
        context: tokens before the first step.
        steps: decode steps.
        layers: how many layers to sample; 0 takes all with an indexer.
        top_k: rows selected.
        seed: of the streams.
        locality: of the streams.
    """

    shape: ModelShape
    context: int
    steps: int
    layers: int
    top_k: int
    seed: int
    locality: LocalityModel = FITTED


def generated(question: Question, buffer: Buffer) -> dict[str, Any]:
    """Miss rate and footprint of generated streams, overall and per layer.

    Raises:
        UserError: sizes that do not fit.
    """
    shape = question.shape
    own = sorted(set(shape.anchors))
    sampled = sample_layers(own, question.layers or len(own))
    rows = shape.rows(question.context)
    spec = StreamSpec(rows, question.top_k, question.steps, len(shape.anchors), question.seed)
    streams = ((shape.kv_layers[i], index_stream(question.locality, spec, i)) for i in sampled)
    return {
        **_report(streams, rows, buffer),
        "model": shape.name,
        "seed": question.seed,
        "fitted_to": list(FITTED_TO),
    }


def recorded(recording: Recording, buffer: Buffer) -> dict[str, Any]:
    """The same of a recording."""
    streams = zip(recording.layers.tolist(), recording.tokens, strict=True)
    return _report(streams, recording.context, buffer)


def _report(
    streams: Iterator[tuple[int, TokenIds]], context: int, buffer: Buffer
) -> dict[str, Any]:
    layers = []
    steps = top_k = 0
    for layer, stream in streams:
        steps, top_k = stream.shape
        if steps <= WARM_STEPS:
            raise UserError(f"{steps} steps", remedy=f"give more than {WARM_STEPS}")
        layers.append(
            {"layer": layer, **_figures(stream, context, misses(stream, context, buffer))}
        )
    return {
        "policy": buffer.policy,
        "hot_buffer": buffer.slots,
        "top_k": top_k,
        "context": context,
        "steps": steps,
        "warm_steps": WARM_STEPS,
        "miss_rate": _mean(layers, "miss_rate"),
        "kv_touched_fraction": _mean(layers, "kv_touched_fraction"),
        "step_overlap": _mean(layers, "step_overlap"),
        "layers": layers,
    }


def _figures(stream: TokenIds, context: int, made: Misses) -> dict[str, float]:
    steps = stream.shape[0]
    warm = stream[WARM_STEPS:]
    same = sum(int(np.isin(new[new >= 0], old).sum()) for old, new in pairwise(warm))
    return {
        "miss_rate": round(int(made.rows[WARM_STEPS:].sum()) / int(np.count_nonzero(warm >= 0)), 6),
        "kv_touched_fraction": round(made.touched / (context + steps - 1), 6),
        "step_overlap": round(same / max(1, int(np.count_nonzero(warm[1:] >= 0))), 6),
    }


def _mean(layers: list[dict[str, Any]], name: str) -> float:
    return round(float(np.mean([layer[name] for layer in layers])), 6)
