"""The models that are simulated: by name, or by a Hugging Face config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from emu.errors import UserError
from emu.sim.models import model_shape, shape_of_config

if TYPE_CHECKING:
    from pathlib import Path

K = 1024
HF = {
    "num_hidden_layers": 6,
    "index_topk": 128,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}


def test_dimensions_are_the_published_ones() -> None:
    v32, glm, glm53, v4 = (
        model_shape(n) for n in ("deepseek-v3.2", "glm-5.1", "glm-5.3", "deepseek-v4")
    )
    assert v32.layout("bf16").token_bytes == 70_272 + 8_052
    assert glm.layout("fp8").token_bytes == 51_168 + 10_296
    assert len(glm53.index_layers) == 21
    assert glm53.layout("fp8").token_bytes == 51_168 + 2_772
    assert (v4.rows(1_048_576), v4.row_bytes("bf16"), v4.top_k) == (262_144, 584, 512)
    assert glm53.anchors[:8] == (0, 1, 2, 2, 2, 2, 6, 6)


def test_hugging_face_configs() -> None:
    assert shape_of_config(HF, "x").index_layers == tuple(range(6))
    shared = shape_of_config(
        {**HF, "indexer_types": ["full", "shared", "shared", "full", "shared", "shared"]}, "x"
    )
    assert shared.index_layers == (0, 3)
    v4 = shape_of_config({**HF, "compress_ratios": [0, 0, 4, 128, 4, 128]}, "x")
    assert (v4.kv_layers, v4.tokens_per_row) == ((2, 4), 4)


@pytest.mark.parametrize(
    "change",
    [
        {"index_topk": None},
        {"kv_lora_rank": 256},
        {"num_hidden_layers": "many"},
        {"index_head_dim": 64},
        {"indexer_types": ["shared"] * 6},
        {"compress_ratios": [0, 128, 128, 0, 0, 0]},
    ],
)
def test_configs_of_other_families_are_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HF, **change}))
    with pytest.raises(UserError):
        model_shape(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="not a model's config"):
        model_shape(str(path))


def test_a_config_is_found_in_its_directory_and_a_deep_one_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(UserError, match="not a model's config"):
        model_shape(str(deep))
    with pytest.raises(UserError, match="not a model's config"):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(
    "field", ["compress_ratios", "indexer_types", "index_topk", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", ['"x"', "[null]", "{}", "NaN", "1e999", "[[1]]"])
def test_a_config_with_a_field_of_another_type_is_refused(
    tmp_path: Path, field: str, value: str
) -> None:
    config = '{"num_hidden_layers": 4, "index_topk": 64, "max_position_embeddings": 4096, "kv_lora_rank": 512, '
    (tmp_path / "config.json").write_text(config + f'"{field}": {value}}}')
    with pytest.raises(UserError):
        model_shape(str(tmp_path))
