"""Sizes of KV rows and index keys, as SGLang and FlashMLA keep them on a GPU; emu.sac.codec makes the bytes.

KV row, BF16, 1152 B: `512 x bf16 latent | 64 x bf16 rope`.
KV row, FP8, 656 B: `512 x e4m3 latent | 4 x fp32 scale, one per 128 latents | 64 x bf16 rope`.
Index key, 132 B: `128 x e4m3 | 1 x fp32 scale`.
"fp32" rows (2304 B and 512 B) exist to compare with other implementations without rounding.
Sources: SGLang's calculate_mla_kv_cache_dim and index_key_cache.py.
"""

from __future__ import annotations

from typing import Literal, get_args

from emu.errors import UserError

KVDtype = Literal["bf16", "fp8", "fp32"]

LATENT = 512
ROPE = 64
INDEX_DIM = 128
SCALE_GROUP = 128
_KV_ROW_BYTES = {
    "bf16": 2 * (LATENT + ROPE),
    "fp8": LATENT + 4 * (LATENT // SCALE_GROUP) + 2 * ROPE,
    "fp32": 4 * (LATENT + ROPE),
}


def kv_row_bytes(dtype: KVDtype) -> int:
    """Bytes of a KV row.

    Raises:
        UserError: no such dtype.
    """
    return _KV_ROW_BYTES[_checked(dtype)]


def index_row_bytes(dtype: KVDtype) -> int:
    """Bytes of an index key beside KV rows of that dtype.

    Raises:
        UserError: no such dtype.
    """
    return 4 * INDEX_DIM if _checked(dtype) == "fp32" else INDEX_DIM + 4


def _checked(dtype: str) -> str:
    if dtype not in get_args(KVDtype):
        raise UserError(
            f"no KV dtype {dtype!r}", remedy=f"use one of {', '.join(get_args(KVDtype))}"
        )
    return dtype
