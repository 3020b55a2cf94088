"""Random weights of a DSA transformer, drawn in a fixed order from one seed: the same in every process.

Plain random weights would make every token's query independent of the last one's, so the selection would have no
locality. Trained models have it, partly through a few massive channels that hardly change from token to token.
Channel 0 of the residual stream plays that part: every embedding has 1 there, nothing writes to it, and the query
and head-weight projections read it with a gain such that `query_persistence` of their energy stays constant from
token to token (at the embedding's norm; deeper layers see a little less). The output head ignores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from emu.sac.config import ModelConfig

_QUERY_GAIN = 2.0  # attention and selection should prefer some tokens clearly
_NORM_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Lightning Indexer of one layer; shapes as in transformers, weight [out, in].

    Attributes:
        wq_b: [index_heads * index_dim, q_lora_rank].
        wk: [index_dim, hidden].
        k_norm: [index_dim], LayerNorm weight.
        k_norm_bias: [index_dim].
        head_weights: [index_heads, hidden].
    """

    wq_b: Tensor
    wk: Tensor
    k_norm: Tensor
    k_norm_bias: Tensor
    head_weights: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, weight [out, in].

    Attributes:
        attention_norm: [hidden].
        q_a: [q_lora_rank, hidden].
        q_a_norm: [q_lora_rank].
        q_b: [heads * (nope_dim + rope_dim), q_lora_rank].
        kv_a: [kv_lora_rank + rope_dim, hidden].
        kv_a_norm: [kv_lora_rank].
        k_up: [heads, nope_dim, kv_lora_rank].
        v_up: [heads, v_dim, kv_lora_rank].
        o: [hidden, heads * v_dim].
        indexer: None where the layer shares a selection.
        ffn_norm: [hidden].
        gate: [ffn, hidden].
        up: [ffn, hidden].
        down: [hidden, ffn].
    """

    attention_norm: Tensor
    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    k_up: Tensor
    v_up: Tensor
    o: Tensor
    indexer: IndexerWeights | None
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model.

    Attributes:
        embedding: [vocab, hidden].
        layers: one per decoder layer.
        norm: [hidden].
        head: [vocab, hidden].
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


class _Draw:
    """Draws tensors from one generator, f32."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._persistent_gain = (
            config.query_persistence / max(1e-9, 1.0 - config.query_persistence)
        ) ** 0.5

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def linear(self, *shape: int, gain: float = 1.0) -> Tensor:
        """Unit-variance inputs give outputs of variance gain**2."""
        return self.normal(*shape) * (gain / math.sqrt(shape[-1]))

    def persistent(self, rows: int, columns: int) -> Tensor:
        """Reads the constant channel with the gain that query_persistence asks for."""
        weight = self.linear(rows, columns)
        weight[:, 0] *= self._persistent_gain * math.sqrt(columns)
        return weight

    def silent(self, rows: int, columns: int) -> Tensor:
        """Writes nothing to the constant channel."""
        weight = self.linear(rows, columns)
        weight[0] = 0.0
        return weight

    def norm(self, width: int) -> Tensor:
        return self.normal(width) * _NORM_SPREAD + 1.0


def _indexer(config: ModelConfig, draw: _Draw) -> IndexerWeights:
    head_weights = draw.persistent(config.index_heads, config.hidden)
    head_weights[
        :, 0
    ].abs_()  # a negative weight would make the tokens that no head likes the best ones
    return IndexerWeights(
        wq_b=draw.linear(config.index_heads * config.index_dim, config.q_lora_rank),
        wk=draw.linear(config.index_dim, config.hidden),
        k_norm=draw.norm(config.index_dim),
        k_norm_bias=_NORM_SPREAD * draw.normal(config.index_dim),
        head_weights=head_weights,
    )


def _layer(config: ModelConfig, draw: _Draw, *, has_indexer: bool) -> LayerWeights:
    head_dim = config.nope_dim + config.rope_dim
    return LayerWeights(
        attention_norm=draw.norm(config.hidden),
        q_a=draw.persistent(config.q_lora_rank, config.hidden),
        q_a_norm=draw.norm(config.q_lora_rank),
        q_b=draw.linear(config.heads * head_dim, config.q_lora_rank, gain=_QUERY_GAIN),
        kv_a=draw.linear(config.kv_lora_rank + config.rope_dim, config.hidden),
        kv_a_norm=draw.norm(config.kv_lora_rank),
        k_up=draw.linear(config.heads, config.nope_dim, config.kv_lora_rank),
        v_up=draw.linear(config.heads, config.v_dim, config.kv_lora_rank),
        o=draw.silent(config.hidden, config.heads * config.v_dim),
        indexer=_indexer(config, draw) if has_indexer else None,
        ffn_norm=draw.norm(config.hidden),
        gate=draw.linear(config.ffn, config.hidden),
        up=draw.linear(config.ffn, config.hidden),
        down=draw.silent(config.hidden, config.ffn),
    )


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights of a model, f32.

    Args:
        config: its shape.
        seed: equal seeds give equal bytes.
    """
    draw = _Draw(config, seed)
    embedding = draw.normal(config.vocab, config.hidden)
    embedding[:, 0] = 1.0
    layers = tuple(
        _layer(config, draw, has_indexer=layer in config.index_layers)
        for layer in range(config.num_layers)
    )
    head = draw.linear(config.vocab, config.hidden, gain=_QUERY_GAIN)
    head[:, 0] = 0.0
    return Weights(embedding, layers, draw.norm(config.hidden), head)
