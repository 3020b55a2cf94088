"""The model against transformers' own DeepSeek-V3.2 and GLM DSA, with the same weights and rows without rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from emu.sac.config import PRESETS, ModelConfig
from emu.sac.model import DsaModel
from emu.sac.oracle import OracleResult, run_oracle

if TYPE_CHECKING:
    from torch import Tensor

    from emu.sac.weights import LayerWeights

pytestmark = pytest.mark.filterwarnings("default")  # transformers' warnings are not ours

PROMPT_TOKENS = 300
OUTPUT_TOKENS = 6
# With few index heads, scores of exactly 0 (no head likes the token) tie at the top-k's edge, where torch.topk
# and so transformers may choose anything; 16 heads leave no ties.
BASE = replace(PRESETS["tiny"], index_heads=16)
CONFIGS = {
    "deepseek_v32": replace(BASE, num_layers=3, index_layers=(0, 1, 2)),
    "glm_moe_dsa": replace(BASE, num_layers=4, index_layers=(0, 2), index_rope_interleaved=True),
}


def transformers_config(family: str, config: ModelConfig) -> Any:
    from transformers import DeepseekV32Config, GlmMoeDsaConfig

    shape = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank,
        "qk_rope_head_dim": config.rope_dim,
        "qk_nope_head_dim": config.nope_dim,
        "v_head_dim": config.v_dim,
        "index_topk": config.top_k,
        "index_head_dim": config.index_dim,
        "index_n_heads": config.index_heads,
        "mlp_layer_types": ["dense"] * config.num_layers,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attn_implementation": "eager",
    }
    if family == "deepseek_v32":
        return DeepseekV32Config(**shape)
    types = ["full" if i in config.index_layers else "shared" for i in range(config.num_layers)]
    return GlmMoeDsaConfig(**shape, indexer_types=types)


def layer_state(prefix: str, weights: LayerWeights) -> dict[str, Tensor]:
    """Our weights of a layer under transformers' names."""
    kv_b = torch.cat([weights.k_up, weights.v_up], dim=1)
    attention = f"{prefix}.self_attn"
    state = {
        f"{prefix}.input_layernorm.weight": weights.attention_norm,
        f"{attention}.q_a_proj.weight": weights.q_a,
        f"{attention}.q_a_layernorm.weight": weights.q_a_norm,
        f"{attention}.q_b_proj.weight": weights.q_b,
        f"{attention}.kv_a_proj_with_mqa.weight": weights.kv_a,
        f"{attention}.kv_a_layernorm.weight": weights.kv_a_norm,
        f"{attention}.kv_b_proj.weight": kv_b.reshape(-1, kv_b.shape[-1]),
        f"{attention}.o_proj.weight": weights.o,
        f"{prefix}.post_attention_layernorm.weight": weights.ffn_norm,
        f"{prefix}.mlp.gate_proj.weight": weights.gate,
        f"{prefix}.mlp.up_proj.weight": weights.up,
        f"{prefix}.mlp.down_proj.weight": weights.down,
    }
    if weights.indexer is not None:
        indexer = f"{attention}.indexer"
        state |= {
            f"{indexer}.wq_b.weight": weights.indexer.wq_b,
            f"{indexer}.wk.weight": weights.indexer.wk,
            f"{indexer}.k_norm.weight": weights.indexer.k_norm,
            f"{indexer}.k_norm.bias": weights.indexer.k_norm_bias,
            f"{indexer}.weights_proj.weight": weights.indexer.head_weights,
        }
    return state


def load_transformers(family: str, model: DsaModel) -> Any:
    from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM

    cls = DeepseekV32ForCausalLM if family == "deepseek_v32" else GlmMoeDsaForCausalLM
    theirs = cls(transformers_config(family, model.config)).to(torch.float32).eval()
    state = {
        "model.embed_tokens.weight": model.weights.embedding,
        "model.norm.weight": model.weights.norm,
        "lm_head.weight": model.weights.head,
    }
    for number, weights in enumerate(model.weights.layers):
        state |= layer_state(f"model.layers.{number}", weights)
    theirs.load_state_dict(state, strict=True)
    return theirs


@dataclass
class Both:
    """The same request through both implementations."""

    model: DsaModel
    ours: OracleResult
    cache: Any
    logits: list[Tensor]
    selections: list[dict[int, set[int]]]


def run_theirs(theirs: Any, config: ModelConfig, prompt: Tensor, ours: OracleResult) -> Any:
    """Prefill, then our tokens one by one; logits and selections of every decode step."""
    selected: dict[int, set[int]] = {}
    for layer in config.index_layers:
        theirs.model.layers[layer].self_attn.indexer.register_forward_hook(
            lambda _module, _args, out, layer=layer: selected.update(
                {layer: set(out[0, -1].tolist())}
            )
        )
    logits, selections = [], []
    with torch.no_grad():
        cache = theirs(prompt[None, :-1], use_cache=True).cache
        for token in [int(prompt[-1]), *ours.tokens[:-1]]:
            out = theirs(torch.tensor([[token]]), cache=cache, use_cache=True)
            logits.append(out.logits[0, -1])
            selections.append(dict(selected))
    return cache, logits, selections


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def both(request: pytest.FixtureRequest) -> Both:
    model = DsaModel(CONFIGS[request.param], "fp32", seed=3)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, model.config.vocab, (PROMPT_TOKENS,), generator=generator)
    ours = run_oracle(model, prompt, OUTPUT_TOKENS)
    theirs = load_transformers(request.param, model)
    return Both(model, ours, *run_theirs(theirs, model.config, prompt, ours))


def test_logits_agree(both: Both) -> None:
    for ours, theirs in zip(both.ours.logits, both.logits, strict=True):
        assert float(theirs.std()) > 0.5
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=2e-4)


def test_greedy_tokens_agree(both: Both) -> None:
    assert both.ours.tokens == [int(logits.argmax()) for logits in both.logits]


def test_selected_tokens_agree(both: Both) -> None:
    config = both.model.config
    for ours, theirs in zip(both.ours.selections, both.selections, strict=True):
        for layer in range(config.num_layers):
            assert set(ours[layer].tolist()) == theirs[config.anchors[layer]]
            assert len(theirs[config.anchors[layer]]) == config.top_k < PROMPT_TOKENS


def test_rows_agree_with_their_cache(both: Both) -> None:
    length = PROMPT_TOKENS - 1 + OUTPUT_TOKENS
    for layer in range(both.model.config.num_layers):
        theirs = both.cache.layers[layer]
        values = torch.cat([theirs.keys[0, 0], theirs.values[0, 0]], dim=-1)[:length]
        ours = both.model.kv_codec.decode(both.ours.rows["kv"][layer])
        torch.testing.assert_close(ours, values, rtol=0, atol=2e-4)


def test_index_keys_agree_with_their_cache(both: Both) -> None:
    for number, layer in enumerate(both.model.config.index_layers):
        theirs = both.cache.layers[layer].indexer_keys[0]
        ours = both.ours.rows["index"][number].view(np.float32)
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=2e-4)
