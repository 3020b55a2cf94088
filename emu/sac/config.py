"""Shapes of the SAC engine's models, and the layout of the rows that they keep in a pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from emu.errors import UserError
from emu.layout import Component, KVLayout
from emu.sac.row_format import index_row_bytes, kv_row_bytes

if TYPE_CHECKING:
    from emu.sac.row_format import KVDtype


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a DeepSeek-V3.2-style DSA transformer.

    Row shapes (kv_lora_rank, rope_dim, index_dim) are DeepSeek-V3.2's and GLM-5's own, so rows have their real
    bytes; the rest is small, because one core computes it.

    Attributes:
        num_layers: decoder layers.
        hidden: width of the residual stream; channel 0 is constant (see emu.sac.weights).
        heads: attention heads.
        q_lora_rank: width of the compressed query.
        nope_dim: dimensions per head without rotary embedding.
        v_dim: value dimensions per head.
        index_heads: heads of the Lightning Indexer.
        top_k: tokens that a query attends to.
        hot_buffer: slots of a request's hot buffer in each layer, the slot of the newest token not counted.
        ffn: width of the dense SwiGLU feed-forward network.
        vocab: tokens.
        max_context: longest prompt and output together.
        index_layers: layers with an indexer; another layer takes over the selection of the nearest earlier one
            (GLM-5.2's cross-layer sharing).
        index_rope_interleaved: rotary pairs of the indexer: neighbours (GLM) or halves (DeepSeek-V3.2).
        kv_lora_rank: width of the KV latent.
        rope_dim: rotary dimensions.
        index_dim: width of an index key.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of the residual stream's RMS norms.
        query_persistence: share of a query's energy that does not change from token to token, 0..1; this is what
            gives random weights a selection with locality (see emu.sac.weights).
    """

    num_layers: int
    hidden: int
    heads: int
    q_lora_rank: int
    nope_dim: int
    v_dim: int
    index_heads: int
    top_k: int
    hot_buffer: int
    ffn: int
    vocab: int
    max_context: int
    index_layers: tuple[int, ...]
    index_rope_interleaved: bool = False
    kv_lora_rank: int = 512
    rope_dim: int = 64
    index_dim: int = 128
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    query_persistence: float = 0.95

    def __post_init__(self) -> None:
        """Refuse index layers that leave a layer without a selection.

        Raises:
            UserError: says what is wrong.
        """
        layers = self.index_layers
        if not layers or layers[0] != 0 or list(layers) != sorted(set(layers)):
            raise UserError(f"index_layers {layers} must ascend from layer 0")
        if layers[-1] >= self.num_layers:
            raise UserError(f"index_layers {layers} name a layer beyond {self.num_layers - 1}")

    @cached_property
    def anchors(self) -> tuple[int, ...]:
        """For each layer, the layer whose selection it uses: itself where it has an indexer."""
        return tuple(
            max(i for i in self.index_layers if i <= layer) for layer in range(self.num_layers)
        )

    def layout(self, kv_dtype: KVDtype) -> KVLayout:
        """Rows in a pool: "kv" of all layers, "index" of the layers with an indexer.

        Args:
            kv_dtype: "bf16", "fp8", or "fp32" (only for comparing with other implementations).

        Raises:
            UserError: no such dtype.
        """
        every_layer = tuple(range(self.num_layers))
        return KVLayout(
            (
                Component("kv", kv_row_bytes(kv_dtype), every_layer),
                Component("index", index_row_bytes(kv_dtype), self.index_layers),
            )
        )


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        num_layers=2,
        hidden=128,
        heads=4,
        q_lora_rank=64,
        nope_dim=32,
        v_dim=32,
        index_heads=4,
        top_k=64,
        hot_buffer=128,
        ffn=256,
        vocab=2048,
        max_context=32_768,
        index_layers=(0, 1),
    ),
    "small": ModelConfig(
        num_layers=4,
        hidden=256,
        heads=4,
        q_lora_rank=128,
        nope_dim=32,
        v_dim=32,
        index_heads=4,
        top_k=2048,
        hot_buffer=4096,
        ffn=512,
        vocab=8192,
        max_context=131_072,
        index_layers=(0, 1, 2, 3),
    ),
}


def preset(name: str) -> ModelConfig:
    """The preset of that name.

    Raises:
        UserError: no such preset; names those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UserError(f"no model {name!r}", remedy=f"use one of {', '.join(PRESETS)}") from None
