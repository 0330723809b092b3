# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Codes of the FP8 and FP4 encodings in PyTorch operations: encode fp32 values, decode codes.

PyTorch's own casts round to nearest even in all four FP8 dtypes, but overflow gives NaN, Inf or the maximum by dtype
and release, and a NaN keeps its sign: values are clamped, and NaN made positive, before the cast. Devices whose PyTorch
has no float8 casts take the integer path, which works on the fp32 bits.
"""

from __future__ import annotations

import math

import torch

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch_torch.stochastic import Draws

DTYPES = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}

#: Device types whose PyTorch casts fp32 to and from all four float8 dtypes. Meta tensors follow any path.
_HAS_CASTS = ("cpu", "cuda", "meta")


def encode_(
    y: torch.Tensor, encoding: str, max_value: float, keeps_negative_zero: bool, draws: Draws | None = None
) -> torch.Tensor:
    """Codes (uint8) of fp32 values, rounded to nearest even and saturated. Overwrites `y`.

    Args:
        y: float32, any shape, memory of the caller's own.
        max_value: where to saturate.
        keeps_negative_zero: False writes +0 for everything that rounds to -0.
        draws: for stochastic rounding.
    """
    info = ENCODINGS[encoding]
    if draws is not None:
        y = draws.rounded(y, info, max_value)
    if encoding == "e2m1":
        return _encode_e2m1(y, keeps_negative_zero)
    if y.device.type not in _HAS_CASTS:
        return encode_bits(y, encoding, max_value, keeps_negative_zero)
    # The replacement NaN is positive, so the cast writes 7F (OCP) whatever sign came in.
    y = y.nan_to_num_(nan=math.nan, posinf=max_value, neginf=-max_value).clamp_(-max_value, max_value)
    if info.negative_zero and not keeps_negative_zero:
        # Up to half the smallest subnormal, the tie included, rounds to zero: hardshrink makes those +0 in one pass.
        y = torch.nn.functional.hardshrink(y, info.min_subnormal / 2)
    return y.to(DTYPES[encoding]).view(torch.uint8)


def encode_bits(y: torch.Tensor, encoding: str, max_value: float, keeps_negative_zero: bool) -> torch.Tensor:
    """The same codes by integer arithmetic on the fp32 bits, for devices without float8 casts."""
    info = ENCODINGS[encoding]
    bits = y.view(torch.int32)
    negative = bits < 0
    limit = torch.tensor(max_value, dtype=torch.float32, device=y.device)
    magnitude = torch.minimum((bits & 0x7FFFFFFF).view(torch.float32), limit).view(torch.int32)
    drop = 23 - info.mantissa_bits
    # Normal codes: rebias the exponent, then add half of the last kept bit, minus one where it is already even.
    rebias = (127 - info.bias) << 23
    odd = (magnitude >> drop) & 1
    normal = (magnitude - rebias + ((1 << (drop - 1)) - 1) + odd) >> drop
    # Subnormal codes count the smallest subnormal; adding 1.5 * 2^23 of it makes fp32's own rounding do the work.
    magic = torch.tensor(1.5 * 2.0**23 * info.min_subnormal, dtype=torch.float32, device=y.device)
    subnormal = (magnitude.view(torch.float32) + magic).view(torch.int32) - magic.view(torch.int32)
    smallest_normal = (127 - info.bias + 1) << 23
    code = torch.where(magnitude < smallest_normal, subnormal, normal)
    signed = negative & (code != 0) if not (info.negative_zero and keeps_negative_zero) else negative
    code = torch.where(signed, code | 0x80, code)
    nan = 0x7F if info.nan_code is None else info.nan_code
    return torch.where(torch.isnan(y), nan, code).to(torch.uint8)


def decode(codes: torch.Tensor, encoding: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of FP8 codes (uint8), exact in float32, bfloat16 (all four) and float16 (not e5m2fnuz's smallest)."""
    if codes.device.type in _HAS_CASTS:
        return codes.view(DTYPES[encoding]).to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(DTYPES[encoding]).to(dtype).to(codes.device)
    return table[codes.long()]


def _encode_e2m1(y: torch.Tensor, keeps_negative_zero: bool) -> torch.Tensor:
    """Codes (uint8, low nibble) of fp32 values; NaN becomes +6.

    The code is linear in the value in each of [0, 2), [2, 4) and [4, 6] and keeps the parity of the rounded number
    there, so that rounding to nearest even picks the even code.
    """
    y = y.nan_to_num_(nan=6.0, posinf=6.0, neginf=-6.0)
    a = y.abs().clamp_(max=6.0)
    small, middle, large = torch.round(a * 2.0), torch.round(a) + 2.0, torch.round(a * 0.5) + 4.0
    code = torch.where(a < 2.0, small, torch.where(a < 4.0, middle, large)).to(torch.uint8)
    negative = torch.signbit(y) if keeps_negative_zero else torch.signbit(y) & (code != 0)
    return code | (negative.to(torch.uint8) << 3)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last dimension, the even column in the low nibble; an odd length is padded with 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(data: torch.Tensor, columns: int) -> torch.Tensor:
    """Values (float32) of packed codes; `columns` is the unpacked length."""
    return e2m1_values(torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)[..., :columns])


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of codes that lie one a byte."""
    magnitude = (codes & 7).to(torch.float32)
    value = torch.where(magnitude < 4, magnitude * 0.5, torch.where(magnitude < 6, magnitude - 2.0, magnitude * 2 - 8))
    return torch.where(codes >= 8, -value, value)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two (float32) of E8M0 codes: 2^(code - 127); FF is NaN."""
    wide = codes.to(torch.int32)
    # 2^-127 is subnormal in fp32 (bits 0x00400000); every other exponent is the exponent field itself.
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)
