"""Bytes of KV rows and index keys, in the formats of emu.sac.row_format.

A scale is max(amax, 1e-4) / 448 (DeepSeek-V3.2's act_quant, without its optional rounding to powers of two), a
value is round-to-nearest-even of x / scale.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from emu.sac.row_format import (
    INDEX_DIM,
    LATENT,
    ROPE,
    SCALE_GROUP,
    index_row_bytes,
    kv_row_bytes,
)

if TYPE_CHECKING:
    from emu.sac.row_format import KVDtype

Rows = npt.NDArray[np.uint8]

_E4M3_MAX = 448.0
_AMAX_FLOOR = 1e-4
_LATENT_SCALES = LATENT // SCALE_GROUP


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _tensor_of(rows: Rows, row_bytes: int) -> Tensor:
    """A view of rows; the bytes are only ever read, so torch's warning about read-only arrays does not apply.

    Raises:
        ValueError: not uint8 [n, row_bytes].
    """
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != row_bytes:
        raise ValueError(
            f"rows: got {rows.dtype.name} {list(rows.shape)}, wanted uint8 [?, {row_bytes}]"
        )
    if rows.shape[0] == 0:  # numpy gives no rows strides that torch cannot view as wider elements
        return torch.empty(0, row_bytes, dtype=torch.uint8)
    if rows.flags.writeable:
        return torch.from_numpy(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(rows)


def _e4m3_table() -> Tensor:
    every_byte = torch.arange(256, dtype=torch.uint8)
    return every_byte.view(torch.float8_e4m3fn).to(torch.float32)


# Decoded by index_select in this table: bit for bit torch's own cast from float8.
_E4M3 = _e4m3_table()


def _quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [n, groups * 128] to (e4m3 bytes [n, groups * 128], f32 scales [n, groups])."""
    groups = values.reshape(values.shape[0], values.shape[1] // SCALE_GROUP, SCALE_GROUP)
    scales = groups.abs().amax(dim=-1).clamp_min(_AMAX_FLOOR) / _E4M3_MAX
    scaled = (groups / scales.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).reshape(values.shape), scales


def _dequantize(data: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write e4m3 bytes [n, groups * 128] times scales [n, groups] to out f32 of data's shape."""
    values = _E4M3.index_select(0, data.to(torch.int32).reshape(-1))
    grouped = values.view(*scales.shape, SCALE_GROUP)
    torch.mul(grouped, scales.unsqueeze(-1), out=grouped)
    out.copy_(grouped.view(data.shape))


class KVCodec:
    """KV rows: a latent and the rotary part of the key.

    Args:
        dtype: "bf16", "fp8" or "fp32".

    Raises:
        UserError: no such dtype.
    """

    def __init__(self, dtype: KVDtype) -> None:
        self.row_bytes = kv_row_bytes(dtype)
        self.dtype = dtype

    def encode(self, latent: Tensor, rope: Tensor) -> Rows:
        """Rows of n tokens.

        Args:
            latent: f32 [n, 512].
            rope: f32 [n, 64].

        Returns:
            uint8 [n, row_bytes].
        """
        if self.dtype == "fp8":
            data, scales = _quantize(latent)
            parts = [data, _bytes_of(scales), _bytes_of(rope.to(torch.bfloat16))]
        else:
            dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
            parts = [_bytes_of(latent.to(dtype)), _bytes_of(rope.to(dtype))]
        return torch.cat(parts, dim=1).numpy()

    def decode(self, rows: Rows) -> Tensor:
        """Values of rows, in memory of their own (aligned, so that kernels never depend on the caller's buffer).

        Args:
            rows: uint8 [n, row_bytes], C-contiguous.

        Returns:
            f32 [n, 576]: latent, then rope.

        Raises:
            ValueError: another shape or dtype.
        """
        data = _tensor_of(rows, self.row_bytes)
        if self.dtype == "bf16":
            return data.view(torch.bfloat16).to(torch.float32)
        if self.dtype == "fp32":
            return data.view(torch.float32).clone()
        out = torch.empty(data.shape[0], LATENT + ROPE)
        scales_end = LATENT + 4 * _LATENT_SCALES
        _dequantize(
            data[:, :LATENT], data[:, LATENT:scales_end].view(torch.float32), out[:, :LATENT]
        )
        out[:, LATENT:] = data[:, scales_end:].view(torch.bfloat16)
        return out


class IndexCodec:
    """Index keys: e4m3 with one scale, whichever dtype the KV rows have; f32 beside "fp32" KV rows.

    Args:
        kv_dtype: the KV rows' dtype.

    Raises:
        UserError: no such dtype.
    """

    def __init__(self, kv_dtype: KVDtype) -> None:
        self.row_bytes = index_row_bytes(kv_dtype)
        self.exact = kv_dtype == "fp32"

    def encode(self, keys: Tensor) -> Rows:
        """Rows of n index keys: f32 [n, 128] to uint8 [n, row_bytes]."""
        if self.exact:
            return _bytes_of(keys).numpy().copy()
        data, scales = _quantize(keys)
        return torch.cat([data, _bytes_of(scales)], dim=1).numpy()

    def decode(self, rows: Rows, out: Tensor) -> None:
        """Write the values of rows, uint8 [n, row_bytes], to out, f32 [n, 128].

        Raises:
            ValueError: another shape or dtype.
        """
        data = _tensor_of(rows, self.row_bytes)
        if self.exact:
            out.copy_(data.view(torch.float32))
        else:
            _dequantize(data[:, :INDEX_DIM], data[:, INDEX_DIM:].view(torch.float32), out)
