"""A generator of index streams: what each layer's indexer selects, step after step, as a mixture of four parts.

A step's selection of k tokens is
- the newest tokens (a window),
- most of a slowly drifting active set: tokens near the indexer's threshold flicker in and out of the selection,
- a background, drawn with a Zipf skew from the pool of tokens that this layer ever looks at,
- in layers of more or less of each: layers differ (`spread`), and look at partly the same tokens (`layer_overlap`).

The active set is a part of the pool, and drift swaps tokens of the two: the pool is what is ever touched.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from emu import _native
from emu.errors import UserError

if TYPE_CHECKING:
    from emu.store import TokenIds

FITTED_TO = (
    "HiSparse (arXiv 2608.07009), GLM-5.1, top-k 2048, LongBenchV2: LRU misses 30 % with a hot buffer of 2048 "
    "slots, 13.4 % with 4096",
    "SAC (arXiv 2606.19746), Fig 4: 21 % of a 128K context touched in 1K output tokens",
)


@dataclass(frozen=True, slots=True)
class LocalityModel:
    """Parts of a selection, as fractions.

    Attributes:
        window: newest tokens that are always selected, of k.
        background: share of the selection that is drawn from the whole pool.
        flicker: share of the active set that a step leaves out.
        drift: tokens that leave the active set, per step, of k.
        zipf: skew of the background.
        pool: tokens that a layer ever looks at beyond its active set, of the context.
        spread: standard deviation over the layers of the logarithm of background and flicker.
        layer_overlap: share of a layer's pool that all layers have in common.
    """

    window: float = 1 / 32
    background: float = 0.3225
    flicker: float = 0.14
    drift: float = 0.001
    zipf: float = 1.2
    pool: float = 0.199
    spread: float = 0.4
    layer_overlap: float = 0.7

    def __post_init__(self) -> None:
        """Refuse fractions that cannot be.

        Raises:
            UserError: names the one that is wrong.
        """
        for name in ("window", "background", "flicker", "drift", "pool", "layer_overlap"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"locality: {name} is {value}", remedy="give 0 .. 1")
        if not 0 <= self.zipf <= 4 or not 0 <= self.spread <= 2:
            raise UserError(
                f"locality: zipf {self.zipf}, spread {self.spread}", remedy="give 0 .. 4 and 0 .. 2"
            )


FITTED = LocalityModel()
"""The parts fitted to FITTED_TO."""


def activity(model: LocalityModel, layer: int, layers: int) -> float:
    """How much more a layer's selection moves than the mean layer's: quantiles of a lognormal with mean 1.

    Early layers move most: consecutive selections overlap by 1-2 % in layers 0-1 and by 35-50 % in deep ones
    (GVR, arXiv 2604.22312, DeepSeek-V3.2, at second hand).
    """
    if model.spread == 0 or layers == 1:
        return 1.0
    places = [NormalDist().inv_cdf((i + 0.5) / layers) for i in range(layers)]
    values = [math.exp(-model.spread * z) for z in places]
    return values[layer] * layers / sum(values)


def sample_layers(layers: list[int], count: int) -> list[int]:
    """So many of these layers, evenly: the middle one of each part."""
    count = min(count, len(layers))
    return [layers[int((i + 0.5) * len(layers) / count)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One request's streams.

    Attributes:
        context: rows that the request has before the first step.
        top_k: rows that a step selects.
        steps: decode steps.
        layers: of the model that the layer number below counts in.
        seed: the same seed gives the same stream.
    """

    context: int
    top_k: int
    steps: int
    layers: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be.

        Raises:
            UserError: says which.
        """
        if min(self.context, self.top_k, self.steps, self.layers) < 1:
            raise UserError(f"an index stream of {self}", remedy="give 1 or more of each")


def index_stream(model: LocalityModel, spec: StreamSpec, layer: int) -> TokenIds:
    """The tokens that one layer selects, int32 [steps, top_k], different within a step; -1 pads.

    Step t sees context + t rows, of which row context + t - 1 is the newest. A context of no more than top_k rows
    is selected whole.

    Raises:
        UserError: a layer that the model lacks.
    """
    if not 0 <= layer < spec.layers:
        raise UserError(f"layer {layer} of {spec.layers}")
    out = np.full((spec.steps, spec.top_k), -1, np.int32)
    window = max(1, round(model.window * spec.top_k))
    if spec.context < spec.top_k + window:
        return _everything(spec, out)
    parts = _parts(model, spec, window, activity(model, layer, spec.layers))
    seeds = (_seed(spec.seed, "layer", layer), _seed(spec.seed, "common", 0))
    _native.index_stream(
        spec.context, window, *parts, model.zipf, model.layer_overlap, seeds[0], seeds[1], out
    )
    return out


def _parts(
    model: LocalityModel, spec: StreamSpec, window: int, active: float
) -> tuple[int, int, int, float]:
    """background, active set and pool in tokens, drift in tokens per step, of a layer with this activity."""
    rest = spec.top_k - window
    background = min(rest, round(model.background * spec.top_k * active))
    flicker = min(0.9, model.flicker * active)
    room = spec.context - window
    active_set = min(round((rest - background) / (1 - flicker)), room - background)
    pool = min(room, active_set + max(background, round(model.pool * spec.context)))
    return background, active_set, pool, model.drift * spec.top_k * active


def _everything(spec: StreamSpec, out: TokenIds) -> TokenIds:
    """A context that hardly exceeds top_k: the newest top_k rows."""
    for step in range(spec.steps):
        length = spec.context + step
        first = max(0, length - spec.top_k)
        out[step, : length - first] = np.arange(first, length)
    return out


def _seed(seed: int, what: str, number: int) -> int:
    text = f"{seed}/{what}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
