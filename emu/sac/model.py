"""A row-accurate DSA transformer (DeepSeek-V3.2, GLM-5): what it keeps of a token is exactly the pool's rows.

Attention only ever reads rows that went through the codec, so it does not matter where they were in between.
Results are batch-invariant: decode computes one request at a time and prefill whole chunks of one shape per
position, in one thread, on memory that torch aligned; so equal inputs give equal bytes on one kind of processor.
Equations and conventions (norms, rotary layout, scales) follow transformers' deepseek_v32 and glm_moe_dsa, which
leave out the indexer's Hadamard rotation because it changes no dot product; so do we. Layers are dense (no
experts): routing has no influence on the KV path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from emu.sac.chunked_prefill import prefill_chunk
from emu.sac.codec import IndexCodec, KVCodec
from emu.sac.selection import index_scores, top_k
from emu.sac.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from emu.layout import KVLayout
    from emu.sac.chunked_prefill import PrefillState
    from emu.sac.codec import Rows
    from emu.sac.config import ModelConfig
    from emu.sac.row_format import KVDtype
    from emu.sac.selection import IndexKeys, Scores, TokenIds
    from emu.sac.weights import IndexerWeights, Weights

_INNER_EPS = 1e-6  # transformers' default for the norms inside attention and indexer


@dataclass(frozen=True, slots=True)
class Projection:
    """What a layer makes of n tokens before it looks at any other token.

    Attributes:
        kv_rows: uint8 [n, row_bytes], what goes to the pool.
        index_rows: uint8 [n, index row_bytes]; None where the layer shares a selection.
        q_nope: f32 [n, heads, nope_dim].
        q_rope: f32 [n, heads, rope_dim].
        index_queries: f32 [n, index_heads, index_dim]; None where the layer shares a selection.
        head_weights: f32 [n, index_heads], scaled; None where the layer shares a selection.
    """

    kv_rows: Rows
    index_rows: Rows | None
    q_nope: Tensor
    q_rope: Tensor
    index_queries: Tensor | None
    head_weights: Tensor | None


class DsaModel:
    """A DSA transformer with random weights.

    Sets torch to one thread in this process: results must not depend on how a matrix product is split.

    Args:
        config: its shape.
        kv_dtype: how rows are kept: "bf16", "fp8" or "fp32".
        seed: of the weights; equal seeds give equal weights in every process.
        weights: instead of random ones.

    Raises:
        UserError: no such kv_dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: KVDtype = "bf16",
        seed: int = 0,
        *,
        weights: Weights | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.kv_dtype = kv_dtype
        self.kv_codec = KVCodec(kv_dtype)
        self.index_codec = IndexCodec(kv_dtype)
        self.weights = weights or random_weights(config, seed)
        self.softmax_scale = float((config.nope_dim + config.rope_dim) ** -0.5)
        self._head_weight_scale = float(config.index_dim**-0.5 * config.index_heads**-0.5)
        exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
        self._inverse_frequencies = 1.0 / (config.rope_theta**exponents)

    @property
    def layout(self) -> KVLayout:
        """How its rows lie in a pool."""
        return self.config.layout(self.kv_dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [n] to f32 [n, hidden]."""
        return self.weights.embedding.index_select(0, tokens)

    def project(self, layer: int, x: Tensor, positions: Tensor) -> Projection:
        """Queries and rows of n tokens.

        Args:
            layer: model layer.
            x: f32 [n, hidden].
            positions: int64 [n].
        """
        config, weights = self.config, self.weights.layers[layer]
        count = x.shape[0]
        angles = positions.to(torch.float32).unsqueeze(1) * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self._norm(x, weights.attention_norm)
        q_latent = _rms_norm(F.linear(x, weights.q_a), weights.q_a_norm, _INNER_EPS)
        queries = F.linear(q_latent, weights.q_b).view(count, config.heads, -1)
        q_nope, q_rope = torch.split(queries, [config.nope_dim, config.rope_dim], dim=-1)
        latent, rope = torch.split(
            F.linear(x, weights.kv_a), [config.kv_lora_rank, config.rope_dim], dim=-1
        )
        latent = _rms_norm(latent, weights.kv_a_norm, _INNER_EPS)
        kv_rows = self.kv_codec.encode(latent, rotate_interleaved(rope, cos, sin))
        q_rope = rotate_interleaved(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        if weights.indexer is None:
            return Projection(kv_rows, None, q_nope, q_rope, None, None)
        keys, index_queries = self._index(weights.indexer, x, q_latent, (cos, sin))
        head_weights = F.linear(x, weights.indexer.head_weights) * self._head_weight_scale
        return Projection(
            kv_rows, self.index_codec.encode(keys), q_nope, q_rope, index_queries, head_weights
        )

    def select(
        self, layer: int, projection: Projection, i: int, keys: IndexKeys, length: int
    ) -> TokenIds:
        """The top_k tokens that query i attends to, among the first `length`, itself included.

        Args:
            layer: a layer with an indexer.
            projection: of that layer.
            i: which of its tokens.
            keys: the layer's index keys of this request.
            length: tokens that the query may see.

        Returns:
            int32 [top_k], best first, equal scores by lower token; -1 pads.

        Raises:
            ValueError: the layer has no indexer, or there are fewer keys than length.
        """
        if projection.index_queries is None or projection.head_weights is None:
            anchor = self.config.anchors[layer]
            raise ValueError(f"layer {layer} has no indexer; use layer {anchor}'s selection")
        scores = index_scores(
            projection.index_queries[i : i + 1],
            projection.head_weights[i : i + 1],
            keys.first(length),
        )
        return top_k(scores[0].numpy(), self.config.top_k)

    def attend(self, layer: int, x: Tensor, projection: Projection, i: int, rows: Rows) -> Tensor:
        """The layer's output for query i: attention over exactly these rows, then the feed-forward network.

        Args:
            layer: model layer.
            x: f32 [1, hidden], the layer's input.
            projection: of that layer.
            i: which of its tokens.
            rows: uint8 [m, row_bytes], the selected tokens' rows in the selection's order.

        Returns:
            f32 [1, hidden].
        """
        config, weights = self.config, self.weights.layers[layer]
        keys = self.kv_codec.decode(rows)
        latent = keys[:, : config.kv_lora_rank]
        absorbed = torch.bmm(projection.q_nope[i].unsqueeze(1), weights.k_up).squeeze(1)
        queries = torch.cat([absorbed, projection.q_rope[i]], dim=1)
        probabilities = torch.softmax(torch.mm(queries, keys.t()) * self.softmax_scale, dim=-1)
        values = torch.bmm(weights.v_up, torch.mm(probabilities, latent).unsqueeze(2))
        return self.finish(layer, x, values.view(1, -1))

    def finish(self, layer: int, x: Tensor, values: Tensor) -> Tensor:
        """Output projection, residual and feed-forward network.

        Args:
            layer: model layer.
            x: f32 [n, hidden], the layer's input.
            values: f32 [n, heads * v_dim], what attention gathered.

        Returns:
            f32 [n, hidden].
        """
        weights = self.weights.layers[layer]
        x = x + F.linear(values, weights.o)
        normed = self._norm(x, weights.ffn_norm)
        inner = F.silu(F.linear(normed, weights.gate)) * F.linear(normed, weights.up)
        return x + F.linear(inner, weights.down)

    def logits(self, x: Tensor) -> Scores:
        """f32 [1, hidden] to f32 [vocab]; the greedy next token is argmax, the lowest id on ties."""
        head: Scores = F.linear(self._norm(x, self.weights.norm), self.weights.head)[0].numpy()
        return head

    def prefill_chunk(self, tokens: Tensor, start: int, state: PrefillState) -> Mapping[str, Rows]:
        """Rows of the next tokens of a prompt; see emu.sac.chunked_prefill.prefill_chunk."""
        return prefill_chunk(self, tokens, start, state)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(x, weight, self.config.rms_norm_eps)

    def _index(
        self, weights: IndexerWeights, x: Tensor, q_latent: Tensor, cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Index keys f32 [n, index_dim] and index queries f32 [n, index_heads, index_dim]."""
        config = self.config
        rotate = rotate_interleaved if config.index_rope_interleaved else rotate_halves
        cos, sin = cos_sin
        split = [config.rope_dim, config.index_dim - config.rope_dim]
        keys = F.layer_norm(
            F.linear(x, weights.wk),
            (config.index_dim,),
            weights.k_norm,
            weights.k_norm_bias,
            _INNER_EPS,
        )
        key_rope, key_rest = torch.split(keys, split, dim=-1)
        queries = F.linear(q_latent, weights.wq_b).view(x.shape[0], config.index_heads, -1)
        query_rope, query_rest = torch.split(queries, split, dim=-1)
        query_rope = rotate(query_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        return (
            torch.cat([rotate(key_rope, cos, sin), key_rest], dim=-1),
            torch.cat([query_rope, query_rest], dim=-1),
        )


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, f32 [..., d]; the result has all first members, then all second."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (j, j + d/2), f32 [..., d]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
