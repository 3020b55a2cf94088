"""Chunked prefill: 64 tokens at a time, each chunk's shapes given by its position alone.

A short last chunk is padded to 64 tokens, whose rows are dropped. So the rows of a token do not depend on how long
the prompt is, nor on whether the tokens before it were computed here or loaded from a pool: the bytes are equal,
and a shared prefix can be used for what it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from emu.sac.selection import IndexKeys, index_scores, top_k_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from emu.sac.codec import Rows
    from emu.sac.model import DsaModel, Projection

CHUNK_TOKENS = 64


class PrefillState:
    """What the next chunk of one request needs of the tokens before it.

    Args:
        model: the model.
        capacity: tokens to make room for, at least the prompt.
    """

    def __init__(self, model: DsaModel, capacity: int) -> None:
        config = model.config
        room = -(-max(capacity, 1) // CHUNK_TOKENS) * CHUNK_TOKENS
        self.length = 0
        self.capacity = room
        self.index_keys = {
            layer: IndexKeys(config, room, model.kv_dtype) for layer in config.index_layers
        }
        self._model = model
        layers, heads = range(config.num_layers), config.heads
        self.k_nope = [torch.empty(heads, room, config.nope_dim) for _ in layers]
        self.k_rope = [torch.empty(room, config.rope_dim) for _ in layers]
        self.values = [torch.empty(heads, room, config.v_dim) for _ in layers]

    def load(self, rows: Mapping[str, Rows]) -> None:
        """Take over the rows of the next tokens, as a pool's shared prefix has them.

        Args:
            rows: for each component uint8 [its layers, n, row_bytes]; n a multiple of 64.

        Raises:
            ValueError: n is not a multiple of 64, or more than there is room for.
        """
        count = rows["kv"].shape[1]
        if count % CHUNK_TOKENS:
            raise ValueError(f"{count} tokens loaded, not a multiple of {CHUNK_TOKENS}")
        for start in range(0, count, CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            for layer in range(self._model.config.num_layers):
                self.put_kv(layer, rows["kv"][layer, chunk])
            for number, layer in enumerate(self._model.config.index_layers):
                self.index_keys[layer].extend(rows["index"][number, chunk])
            self.length += CHUNK_TOKENS

    def put_kv(self, layer: int, rows: Rows) -> None:
        """Expand 64 KV rows, uint8 [64, row_bytes], to the keys and values of the tokens at `length`.

        Raises:
            ValueError: no room.
        """
        chunk = slice(self.length, self.length + CHUNK_TOKENS)
        if chunk.stop > self.capacity:
            raise ValueError(f"{chunk.stop} tokens, room for {self.capacity}")
        decoded = self._model.kv_codec.decode(rows)
        latent = decoded[:, : self._model.config.kv_lora_rank].contiguous()
        weights = self._model.weights.layers[layer]
        self.k_nope[layer][:, chunk] = torch.matmul(latent, weights.k_up.transpose(1, 2))
        self.k_rope[layer][chunk] = decoded[:, self._model.config.kv_lora_rank :]
        self.values[layer][:, chunk] = torch.matmul(latent, weights.v_up.transpose(1, 2))


def prefill_chunk(
    model: DsaModel, tokens: Tensor, start: int, state: PrefillState
) -> Mapping[str, Rows]:
    """Compute the rows of the next tokens of a prompt.

    Args:
        model: the model.
        tokens: int64 [n], n at most 64; fewer only in the last chunk.
        start: position of tokens[0], a multiple of 64 and the state's length.
        state: the tokens before; holds these too afterwards.

    Returns:
        For each component uint8 [its layers, n, row_bytes].

    Raises:
        ValueError: a wrong start or number of tokens, or no room.
    """
    config, count = model.config, tokens.shape[0]
    if not 0 < count <= CHUNK_TOKENS or start != state.length or start % CHUNK_TOKENS:
        raise ValueError(
            f"chunk of {count} tokens at {start}: wanted 1..{CHUNK_TOKENS} at {state.length}, "
            f"and only the last chunk short"
        )
    positions = torch.arange(start, start + CHUNK_TOKENS)
    x = model.embed(F.pad(tokens, (0, CHUNK_TOKENS - count)))
    causal = torch.arange(start + CHUNK_TOKENS) <= positions.unsqueeze(1)
    allowed = causal
    kv_rows, index_rows = [], []
    for layer in range(config.num_layers):
        projection = model.project(layer, x, positions)
        kv_rows.append(projection.kv_rows[:count])
        state.put_kv(layer, projection.kv_rows)
        if projection.index_rows is not None:
            index_rows.append(projection.index_rows[:count])
            state.index_keys[layer].extend(projection.index_rows)
        if layer == config.num_layers - 1:
            break  # nobody reads the last layer's output: the prompt's last token goes to decode
        if projection.index_queries is not None:
            allowed = _allowed(projection, state.index_keys[layer], causal, config.top_k)
        x = model.finish(layer, x, _attention(model, layer, projection, state, allowed))
    state.length = start + count
    return {"kv": np.stack(kv_rows), "index": np.stack(index_rows)}


def _allowed(projection: Projection, keys: IndexKeys, causal: Tensor, top_k: int) -> Tensor:
    """Which tokens each query attends to, bool [64, context]."""
    context = causal.shape[1]
    if context <= top_k:
        return causal
    assert projection.index_queries is not None
    assert projection.head_weights is not None
    scores = index_scores(projection.index_queries, projection.head_weights, keys.first(context))
    scores.masked_fill_(~causal, -torch.inf)
    return torch.from_numpy(top_k_mask(scores.numpy(), top_k))


def _attention(
    model: DsaModel, layer: int, projection: Projection, state: PrefillState, allowed: Tensor
) -> Tensor:
    """Masked attention of 64 queries over the whole context, f32 [64, heads * v_dim]."""
    context = allowed.shape[1]
    bias = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    q_rope = (projection.q_rope * model.softmax_scale).transpose(0, 1).contiguous()
    q_nope = (projection.q_nope * model.softmax_scale).transpose(0, 1).contiguous()
    k_rope = state.k_rope[layer][:context].t()
    outputs = []
    for head in range(model.config.heads):
        scores = torch.addmm(bias, q_rope[head], k_rope)
        scores.addmm_(q_nope[head], state.k_nope[layer][head, :context].t())
        outputs.append(torch.mm(torch.softmax(scores, dim=-1), state.values[layer][head, :context]))
    return torch.cat(outputs, dim=1)
