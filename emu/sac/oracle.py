"""The in-memory run that every backend must equal, token for token and byte for byte: no store, no hot buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from emu.sac.chunked_prefill import CHUNK_TOKENS, PrefillState
from emu.sac.selection import IndexKeys

if TYPE_CHECKING:
    from torch import Tensor

    from emu.sac.codec import Rows
    from emu.sac.model import DsaModel
    from emu.sac.selection import Scores, TokenIds


@dataclass(frozen=True, slots=True)
class OracleResult:
    """What a request must give.

    Attributes:
        tokens: the output tokens.
        rows: for each component uint8 [its layers, prompt - 1 + output, row_bytes].
        selections: for each decode step int32 [layers, top_k], what attention read.
        logits: for each decode step f32 [vocab].
    """

    tokens: list[int]
    rows: dict[str, Rows]
    selections: list[TokenIds]
    logits: list[Scores]


def run_oracle(model: DsaModel, prompt: Tensor, output_tokens: int) -> OracleResult:
    """Prefill all but the last prompt token, then decode greedily.

    Args:
        model: the model.
        prompt: int64 [n], n at least 1.
        output_tokens: tokens to generate.

    Raises:
        ValueError: an empty prompt.
    """
    if prompt.shape[0] < 1:
        raise ValueError("an empty prompt")
    run = InMemoryRequest(model, prompt.shape[0] - 1 + output_tokens)
    run.prefill(prompt[:-1])
    result = OracleResult([], run.rows, [], [])
    token = int(prompt[-1])
    for _ in range(output_tokens):
        logits, selections = run.step(token)
        token = int(logits.argmax())
        result.tokens.append(token)
        result.selections.append(selections)
        result.logits.append(logits)
    return result


class InMemoryRequest:
    """One request whose rows lie in arrays.

    Args:
        model: the model.
        capacity: tokens that the request will hold at the end.
    """

    def __init__(self, model: DsaModel, capacity: int) -> None:
        layout = model.config.layout(model.kv_dtype)
        self.capacity = capacity
        self._model = model
        self._length = 0
        self.rows = {
            c.name: np.zeros((len(c.layers), capacity, c.row_bytes), np.uint8)
            for c in layout.components
        }
        self._keys = {
            layer: IndexKeys(model.config, capacity, model.kv_dtype)
            for layer in model.config.index_layers
        }

    def __len__(self) -> int:
        return self._length

    def prefill(self, tokens: Tensor) -> None:
        """Compute the rows of the first tokens, int64 [n]."""
        state = PrefillState(self._model, tokens.shape[0])
        for start in range(0, tokens.shape[0], CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            for name, rows in self._model.prefill_chunk(chunk, start, state).items():
                self.rows[name][:, start : start + chunk.shape[0]] = rows
        self._length = tokens.shape[0]
        for number, keys in enumerate(self._keys.values()):
            keys.extend(self.rows["index"][number, : self._length])

    def step(self, token: int) -> tuple[Scores, TokenIds]:
        """Process one token; returns the logits, f32 [vocab], and the selections, int32 [layers, top_k]."""
        model, position = self._model, self._length
        self._length += 1
        x = model.embed(torch.tensor([token]))
        selections: list[TokenIds] = []
        for layer in range(model.config.num_layers):
            projection = model.project(layer, x, torch.tensor([position]))
            self.rows["kv"][layer, position] = projection.kv_rows[0]
            if projection.index_rows is not None:
                number = model.config.index_layers.index(layer)
                self.rows["index"][number, position] = projection.index_rows[0]
                self._keys[layer].extend(projection.index_rows)
                selection = model.select(layer, projection, 0, self._keys[layer], self._length)
            else:
                selection = selections[-1]
            selections.append(selection)
            rows = self.rows["kv"][layer, selection[selection >= 0]]
            x = model.attend(layer, x, projection, 0, rows)
        return model.logits(x), np.stack(selections)
