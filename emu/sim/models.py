"""Models by their published dimensions: what a token keeps where."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.errors import UserError
from emu.layout import Component, KVLayout
from emu.sac.row_format import index_row_bytes, kv_row_bytes
from emu.suggest import unknown
from emu.text_file import refusing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from emu.sac.row_format import KVDtype

V4_ROW_BYTES = 584
"""448 FP8 + 64 BF16 values + 8 scales (SGLang, deepseek_v4_memory_pool.py); the one format there is."""
FULL_LAYERS_GLM_5_3 = (0, 1, 2, *range(6, 78, 4))


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a sparse-attention model that decide what is stored and moved.

    Attributes:
        name: for figures.
        num_layers: layers of the model: compute is per layer of these.
        kv_layers: layers whose rows live in the pool, by number.
        index_layers: those of them with an indexer of their own; the others use the selection of the nearest
            earlier one.
        top_k: rows that a step selects.
        max_context: tokens.
        source: where the dimensions come from.
        tokens_per_row: tokens that a row stands for (DeepSeek-V4 compresses 4 into one).
        fixed_row_bytes: of the one format there is; 0 where the KV dtype decides.
        resident_bytes_per_token: KV that stays in GPU memory and is never offloaded.
        planned_index_bytes: index bytes per token in the capacity planner; 0 takes those of index_layers.
    """

    name: str
    num_layers: int
    kv_layers: tuple[int, ...]
    index_layers: tuple[int, ...]
    top_k: int
    max_context: int
    source: str
    tokens_per_row: int = 1
    fixed_row_bytes: int = 0
    resident_bytes_per_token: float = 0.0
    planned_index_bytes: int = 0

    def row_bytes(self, kv_dtype: KVDtype) -> int:
        """Bytes of a KV row in the pool.

        Raises:
            UserError: a dtype that a row cannot have.
        """
        if self.fixed_row_bytes:
            return self.fixed_row_bytes
        return kv_row_bytes(kv_dtype)

    def layout(self, kv_dtype: KVDtype) -> KVLayout:
        """Rows in a pool, as emu.sac.config gives them for the small models."""
        return KVLayout(
            (
                Component("kv", self.row_bytes(kv_dtype), self.kv_layers),
                Component("index", index_row_bytes(kv_dtype), self.index_layers),
            )
        )

    @cached_property
    def anchors(self) -> tuple[int, ...]:
        """For each KV layer, the place among the KV layers of the one whose selection it uses."""
        places = [self.kv_layers.index(layer) for layer in self.index_layers]
        return tuple(max(p for p in places if p <= i) for i in range(len(self.kv_layers)))

    def rows(self, tokens: int) -> int:
        """Rows that hold that many tokens."""
        return -(-tokens // self.tokens_per_row)


def _every(n: int) -> tuple[int, ...]:
    return tuple(range(n))


_CSA = tuple(range(2, 43, 2))
MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            "deepseek-v3.2",
            61,
            _every(61),
            _every(61),
            2048,
            163_840,
            "DeepSeek-V3.2 report; SGLang",
        ),
        ModelShape("glm-5.1", 78, _every(78), _every(78), 2048, 202_752, "NeMo, GlmMoeDsaConfig"),
        ModelShape(
            "glm-5.3",
            78,
            _every(78),
            FULL_LAYERS_GLM_5_3,
            2048,
            1_048_576,
            "21 full and 57 shared indexer layers: ATOM PR 1260, tt-metal PR 49315; planner: 22 index layers of "
            "128 B, as XM-Sparse counts them",
            planned_index_bytes=22 * 128,
        ),
        ModelShape(
            "deepseek-v4",
            43,
            _CSA,
            _CSA,
            512,
            1_048_576,
            "V4-Flash: NeMo AutoModel DeepseekV4Config; layers 0, 1 sliding window, then compression 4 and 128 in turn",
            tokens_per_row=4,
            fixed_row_bytes=V4_ROW_BYTES,
            resident_bytes_per_token=20 * V4_ROW_BYTES / 128,
        ),
    )
}


def model_shape(name: str) -> ModelShape:
    """A model by name, or by the path of a Hugging Face config.json of the DSA family, or of the directory it is in.

    Raises:
        UserError: no such model, or a file that is no such config.
    """
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return _shape_in(Path(name))
    if Path(name).is_dir():  # as Hugging Face lays a model out
        return _shape_in(Path(name) / "config.json")
    raise unknown("model", name, [*MODELS, "a config.json"])


def _shape_in(path: Path) -> ModelShape:
    with refusing(
        f"{path}: a field of another type or size", "give the config.json of a DSA model"
    ):
        return shape_of_config(_read(path), str(path))


def check_context(shape: ModelShape, context: int) -> None:
    """Refuse a context that the model does not have.

    Raises:
        UserError: so it is.
    """
    if context > shape.max_context:
        raise UserError(
            f"a context of {context} is beyond the {shape.max_context} of model {shape.name}",
            remedy=f"use --context {shape.max_context} or less",
        )


def check_top_k(top_k: int | None, context: int) -> None:
    """Refuse to select more rows than a context has; None, the model's own, takes what is there.

    Raises:
        UserError: so it is.
    """
    if top_k is not None and top_k > context:
        raise UserError(
            f"the top {top_k} of a context of {context} tokens",
            remedy=f"use --top-k {context} or less",
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not a model's config: {error}", remedy="give a config.json"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a model's config", remedy="give a config.json")
    return config


def shape_of_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape in a Hugging Face config: DeepSeek-V3.2 and GLM DSA (with or without shared indexers), DeepSeek-V4.

    Raises:
        UserError: a field is missing or is not of this family.
    """
    layers, top_k = _count(config, "num_hidden_layers", name), _count(config, "index_topk", name)
    context = _count(config, "max_position_embeddings", name)
    if config.get("index_head_dim", 128) != 128:
        raise UserError(
            f"{name}: index_head_dim {config['index_head_dim']}: only index keys of 128 values are known",
            remedy="use a model of the DSA family",
        )
    ratios = config.get("compress_ratios")
    if ratios is not None:
        return _compressed(config, name, list(ratios)[:layers])
    for key, wanted in (("kv_lora_rank", 512), ("qk_rope_head_dim", 64)):
        if config.get(key) != wanted:
            raise UserError(
                f"{name}: {key} is {config.get(key)!r}, rows of {wanted} are known",
                remedy="use a model of the DSA family",
            )
    types = config.get("indexer_types")
    own = _every(layers)
    if types is not None:
        own = tuple(i for i, kind in enumerate(types[:layers]) if kind == "full")
        if not own or own[0] != 0 or len(types) < layers:
            raise UserError(f"{name}: indexer_types do not begin with a full layer, or are too few")
    return ModelShape(name, layers, _every(layers), own, top_k, context, name)


def _compressed(config: dict[str, Any], name: str, ratios: list[Any]) -> ModelShape:
    sparse = tuple(i for i, ratio in enumerate(ratios) if ratio == 4)
    if not sparse:
        raise UserError(f"{name}: no layer has compression 4", remedy="use a DeepSeek-V4 config")
    return replace(
        MODELS["deepseek-v4"],
        name=name,
        num_layers=len(ratios),
        kv_layers=sparse,
        index_layers=sparse,
        top_k=_count(config, "index_topk", name),
        max_context=_count(config, "max_position_embeddings", name),
        source=name,
        resident_bytes_per_token=sum(V4_ROW_BYTES / r for r in ratios if r not in (0, 4)),
    )


def _count(config: dict[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UserError(f"{name}: {key} is {value!r}", remedy="give the config.json of a DSA model")
    return value
