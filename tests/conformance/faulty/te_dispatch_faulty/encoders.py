# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Encoders that are wrong in one way each: of (y, encoding, max_value, keeps_negative_zero), fp32 to codes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch_faulty.binding import swapped
from te_dispatch_torch.encodings import decode, encode_
from te_dispatch_torch.stochastic import Draws

Encoder = Callable[[torch.Tensor, str, float, bool], torch.Tensor]


def encoding_by(encoder: Encoder) -> contextlib.AbstractContextManager[None]:
    """The torch backend with another FP8 encoder; FP4, drawn roundings and scale codes stay right."""

    def fp8_only(
        y: torch.Tensor, encoding: str, max_value: float, keeps: bool, draws: Draws | None = None
    ) -> torch.Tensor:
        if encoding == "e2m1" or draws is not None:
            return encode_(y, encoding, max_value, keeps, draws)
        return encoder(y, encoding, max_value, keeps)

    return swapped(*((module, "encode_", fp8_only) for module in ("quantize", "blocks", "state")))


def _without_negative_zero(codes: torch.Tensor, encoding: str) -> torch.Tensor:
    return codes if ENCODINGS[encoding].negative_zero else torch.where(codes == 0x80, 0, codes)


def truncating(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    exact = y.clone()
    codes = encode_(y, encoding, max_value, keeps)
    up = decode(codes, encoding).abs() > exact.abs()
    return torch.where(up, _without_negative_zero(codes - up.to(torch.uint8), encoding), codes)


def away(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    exact = y.clone()
    codes = encode_(y, encoding, max_value, keeps)
    inside = (codes & 0x7F) < (codes.new_tensor(ENCODINGS[encoding].max_code))
    above = torch.where(inside, codes + 1, codes)
    middle = (decode(codes, encoding).abs() + decode(above, encoding).abs()) / 2
    return torch.where(inside & (middle == exact.abs()) & (codes != 0x80), above, codes)


def overflowing(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    info = ENCODINGS[encoding]
    beyond, negative = y.abs() > max_value, y < 0
    codes = encode_(y, encoding, max_value, keeps)
    special = 0x7C if info.infinity else info.nan_code
    assert special is not None
    return torch.where(beyond, torch.where(negative, special | 0x80, special), codes).to(torch.uint8)


def losing_infinity(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    return encode_(torch.where(y.isinf(), torch.nan, y), encoding, max_value, keeps)


def saturating_nan(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    return encode_(torch.where(y.isnan(), max_value, y), encoding, max_value, keeps)


def keeping_nan_sign(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    negative = y.isnan() & y.signbit()
    codes = encode_(y, encoding, max_value, keeps)
    return torch.where(negative, codes | 0x80, codes)


def keeping_negative_zero(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    negative = y.signbit() & ~y.isnan()
    codes = encode_(y, encoding, max_value, keeps)
    return torch.where(negative & (codes == 0), 0x80, codes).to(torch.uint8)


def flushing(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    info = ENCODINGS[encoding]
    smallest_normal = info.min_subnormal * 2**info.mantissa_bits
    return encode_(torch.where(y.abs() < smallest_normal, y * 0.0, y), encoding, max_value, keeps)


def through_bf16(y: torch.Tensor, encoding: str, max_value: float, keeps: bool) -> torch.Tensor:
    return encode_(y.bfloat16().float(), encoding, max_value, keeps)
