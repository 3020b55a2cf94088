"""The Lightning Indexer's scores and its top-k, with ties broken by the lower token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from emu.sac.codec import IndexCodec

if TYPE_CHECKING:
    from torch import Tensor

    from emu.sac.codec import Rows
    from emu.sac.config import ModelConfig
    from emu.sac.row_format import KVDtype

TokenIds = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]


class IndexKeys:
    """Decoded index keys of one layer of one request.

    Args:
        config: the model's shape.
        capacity: tokens to make room for; more may come.
        kv_dtype: as the model's.
    """

    def __init__(self, config: ModelConfig, capacity: int, kv_dtype: KVDtype = "bf16") -> None:
        self._codec = IndexCodec(kv_dtype)
        self._values = torch.empty(max(capacity, 1), config.index_dim)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, rows: Rows) -> None:
        """Append the keys of the next tokens, uint8 [n, row_bytes].

        Raises:
            ValueError: another shape or dtype.
        """
        end = self._length + rows.shape[0]
        if end > self._values.shape[0]:
            grown = torch.empty(max(end, 2 * self._values.shape[0]), self._values.shape[1])
            grown[: self._length] = self._values[: self._length]
            self._values = grown
        self._codec.decode(rows, self._values[self._length : end])
        self._length = end

    def first(self, length: int) -> Tensor:
        """Keys of the first tokens, f32 [length, index_dim].

        Raises:
            ValueError: there are fewer.
        """
        if not 0 < length <= self._length:
            raise ValueError(f"{length} index keys wanted, {self._length} there")
        return self._values[:length]


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of DeepSeek-V3.2's indexer: I[t, s] = sum_j w[t, j] ReLU(q[t, j] . k[s]).

    Args:
        queries: f32 [n, index_heads, index_dim].
        head_weights: f32 [n, index_heads], scaled by index_dim**-0.5 and index_heads**-0.5 already.
        keys: f32 [length, index_dim].

    Returns:
        f32 [n, length].
    """
    count, heads, width = queries.shape
    products = torch.mm(queries.reshape(count * heads, width), keys.t()).relu_()
    return torch.bmm(head_weights.unsqueeze(1), products.view(count, heads, -1)).squeeze(1)


def top_k(scores: Scores, k: int) -> TokenIds:
    """The k best tokens of f32 [length], best first; equal scores: the lower token first. -1 pads to k.

    Returns:
        int32 [k].
    """
    length = scores.shape[0]
    chosen = np.full(k, -1, dtype=np.int32)
    if length <= k:
        candidates = np.arange(length)
    else:
        threshold = np.partition(scores, length - k)[length - k]
        above = np.flatnonzero(scores > threshold)
        equal = np.flatnonzero(scores == threshold)[: k - above.shape[0]]
        candidates = np.sort(np.concatenate([above, equal]))
    order = np.argsort(-scores[candidates], kind="stable")
    chosen[: candidates.shape[0]] = candidates[order]
    return chosen


def top_k_mask(scores: Scores, k: int) -> npt.NDArray[np.bool_]:
    """top_k of each row of f32 [n, length] as a mask, bool [n, length]; -inf marks what may not be chosen."""
    length = scores.shape[1]
    if length <= k:
        return scores > -np.inf
    threshold = np.partition(scores, length - k, axis=1)[:, length - k : length - k + 1]
    mask = (scores >= threshold) & (scores > -np.inf)
    for row in np.flatnonzero(mask.sum(axis=1) > k):  # ties at the threshold
        mask[row] = False
        mask[row, top_k(scores[row], k)] = True
    return mask
