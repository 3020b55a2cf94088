"""Bytes of KV rows and index keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emu.errors import UserError
from emu.sac.codec import IndexCodec, KVCodec
from emu.sac.config import PRESETS, preset


def values(count: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 3, count).unsqueeze(1)  # small and large rows
    return torch.randn(count, width, generator=generator) * spread


@pytest.mark.parametrize(("dtype", "row_bytes"), [("bf16", 1152), ("fp8", 656), ("fp32", 2304)])
def test_kv_row_bytes(dtype: str, row_bytes: int) -> None:
    codec = KVCodec(dtype)
    rows = codec.encode(values(7, 512), values(7, 64))
    assert rows.dtype == np.uint8
    assert rows.shape == (7, row_bytes)
    assert codec.row_bytes == row_bytes


def test_bf16_row_is_latent_then_rope() -> None:
    latent, rope = values(5, 512), values(5, 64, seed=1)
    rows = KVCodec("bf16").encode(latent, rope)
    for part, start in ((latent, 0), (rope, 1024)):
        bits = part.numpy().view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # round to nearest even, by hand
        stored = rows[:, start : start + 2 * part.shape[1]].copy().view("<u2")
        assert (stored == rounded).all()


def test_fp8_row_is_latent_then_scales_then_rope() -> None:
    latent, rope = values(5, 512), values(5, 64, seed=1)
    rows = KVCodec("fp8").encode(latent, rope)
    scales = rows[:, 512:528].copy().view("<f4")
    for group in range(4):
        part = latent[:, group * 128 : (group + 1) * 128]
        wanted = part.abs().amax(1) / 448
        assert scales[:, group] == pytest.approx(wanted.numpy(), rel=1e-6)
        cast = (part / torch.from_numpy(scales[:, group : group + 1])).to(torch.float8_e4m3fn)
        stored = rows[:, group * 128 : (group + 1) * 128]
        assert (stored == cast.view(torch.uint8).numpy()).all()
    assert (rows[:, 528:656].copy().view("<u2") == bf16_bits(rope)).all()


def bf16_bits(part: torch.Tensor) -> np.ndarray:
    return part.to(torch.bfloat16).view(torch.uint16).numpy()


def test_index_row_is_key_then_scale() -> None:
    keys = values(6, 128)
    rows = IndexCodec("bf16").encode(keys)
    assert rows.shape == (6, 132)
    scale = rows[:, 128:132].copy().view("<f4")
    assert scale[:, 0] == pytest.approx((keys.abs().amax(1) / 448).numpy(), rel=1e-6)
    cast = (keys / torch.from_numpy(scale)).to(torch.float8_e4m3fn)
    assert (rows[:, :128] == cast.view(torch.uint8).numpy()).all()


@pytest.mark.parametrize(("dtype", "relative"), [("bf16", 2**-8), ("fp8", 2**-4), ("fp32", 0.0)])
def test_decode_undoes_encode(dtype: str, relative: float) -> None:
    latent, rope = values(9, 512), values(9, 64, seed=1)
    codec = KVCodec(dtype)
    decoded = codec.decode(codec.encode(latent, rope))
    wanted = torch.cat([latent, rope], dim=1)
    group_peak = latent.view(9, 4, 128).abs().amax(-1).repeat_interleave(128, dim=1)
    # e4m3 has 3 mantissa bits, and below 2**-6 of the scale a fixed step of 2**-9 (half of it is lost at most)
    floor = torch.cat([group_peak / 448 * 2**-10, torch.zeros(9, 64)], dim=1)
    assert ((decoded - wanted).abs() <= relative * wanted.abs() + floor * (dtype == "fp8")).all()
    assert decoded.dtype == torch.float32


def test_fp8_decode_equals_torchs_cast() -> None:
    codec = KVCodec("fp8")
    rows = codec.encode(values(9, 512), values(9, 64))
    data = torch.from_numpy(rows[:, :512].copy()).view(torch.float8_e4m3fn).to(torch.float32)
    scales = torch.from_numpy(rows[:, 512:528].copy()).view(torch.float32)
    wanted = (data.view(9, 4, 128) * scales.unsqueeze(-1)).view(9, 512)
    assert torch.equal(codec.decode(rows)[:, :512], wanted)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "fp32"])
def test_index_decode_undoes_encode(kv_dtype: str) -> None:
    keys = values(6, 128)
    codec = IndexCodec(kv_dtype)
    out = torch.empty(6, 128)
    codec.decode(codec.encode(keys), out)
    peak = keys.abs().amax(1, keepdim=True)
    tolerance = 0 if kv_dtype == "fp32" else keys.abs() * 2**-4 + peak / 448 * 2**-10
    assert ((out - keys).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_no_rows_decode_to_no_values(dtype: str) -> None:
    codec, keys = KVCodec(dtype), IndexCodec(dtype)
    assert codec.decode(np.zeros((0, codec.row_bytes), np.uint8)).shape == (0, 576)
    keys.decode(np.zeros((0, keys.row_bytes), np.uint8), torch.empty(0, 128))


def test_a_row_of_zeros_stays_zero() -> None:
    for codec in (KVCodec("bf16"), KVCodec("fp8"), KVCodec("fp32")):
        decoded = codec.decode(codec.encode(torch.zeros(2, 512), torch.zeros(2, 64)))
        assert torch.equal(decoded, torch.zeros(2, 576))


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_decode_reads_any_buffer_alike(dtype: str) -> None:
    codec = KVCodec(dtype)
    rows = codec.encode(values(9, 512), values(9, 64))
    shifted = np.empty(rows.nbytes + 1, np.uint8)[1:].reshape(rows.shape)
    shifted[:] = rows
    shifted.flags.writeable = False
    assert torch.equal(codec.decode(shifted), codec.decode(rows))
    assert codec.decode(rows).data_ptr() != torch.from_numpy(rows).data_ptr()


@pytest.mark.parametrize(
    "rows", [np.zeros((2, 655), np.uint8), np.zeros((2, 656), np.int8), np.zeros(656, np.uint8)]
)
def test_wrong_rows_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"wanted uint8 \[\?, 656\]"):
        KVCodec("fp8").decode(rows)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(UserError, match="bf16, fp8, fp32"):
        KVCodec("int4")
    with pytest.raises(UserError, match="no KV dtype"):
        IndexCodec("int4")


@pytest.mark.parametrize(("dtype", "kv", "index"), [("bf16", 1152, 132), ("fp8", 656, 132)])
def test_layout_has_the_published_row_bytes(dtype: str, kv: int, index: int) -> None:
    for config in PRESETS.values():
        layout = config.layout(dtype)
        assert [c.name for c in layout.components] == ["kv", "index"]
        assert layout.component("kv").row_bytes == kv
        assert layout.component("kv").layers == tuple(range(config.num_layers))
        assert layout.component("index").row_bytes == index
        assert layout.component("index").layers == config.index_layers


def test_unknown_preset_is_refused() -> None:
    assert preset("tiny") is PRESETS["tiny"]
    with pytest.raises(UserError, match="tiny, small"):
        preset("huge")
