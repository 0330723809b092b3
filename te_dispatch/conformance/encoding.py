# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Codes of values, by search in the table of `te_dispatch.conformance.decoding`: the kit's own encoder.

The reference is the oracle of casts. This one serves where the reference cannot: on samples of a tensor that is too
large for it, and where the contract allows either neighbour of a value.
"""

from __future__ import annotations

import torch

from te_dispatch.conformance.decoding import table
from te_dispatch.numerics.encodings import Encoding, encoding


def neighbours(y: torch.Tensor, name: str, max_value: float, negative_zero: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the largest value that is not above y's magnitude, and of the smallest that is not below it.

    Args:
        y: float32.
        max_value: where the cast saturates, Inf too.
        negative_zero: whether what rounds to -0 stays -0.

    Returns:
        uint8 codes of y's sign, towards zero and away from it; the NaN code in both for NaN.
    """
    found = encoding(name)
    values = _magnitudes(found)
    magnitude = y.double().abs().nan_to_num(nan=0.0, posinf=max_value).clamp_max(max_value).contiguous()
    below = torch.searchsorted(values, magnitude, right=True) - 1
    above = torch.where(values[below] == magnitude, below, below + 1)
    inner, outer = (_signed(code, y, found, negative_zero) for code in (below, above))
    return inner, outer


def nearest(y: torch.Tensor, name: str, max_value: float, negative_zero: bool) -> torch.Tensor:
    """Codes (uint8) of the nearest values, ties to the even code. Arguments as of `neighbours`."""
    found = encoding(name)
    values = _magnitudes(found)
    magnitude = y.double().abs().nan_to_num(nan=0.0, posinf=max_value).clamp_max(max_value).contiguous()
    below = torch.searchsorted(values, magnitude, right=True) - 1
    above = (below + 1).clamp_max(found.max_code)
    from_below, to_above = magnitude - values[below], values[above] - magnitude
    up = (to_above < from_below) | ((to_above == from_below) & (below % 2 == 1))
    return _signed(torch.where(up, above, below), y, found, negative_zero)


def _magnitudes(found: Encoding) -> torch.Tensor:
    """Values of the codes 0 .. max_code, which ascend."""
    return table(found.name)[: found.max_code + 1]


def _signed(code: torch.Tensor, y: torch.Tensor, found: Encoding, negative_zero: bool) -> torch.Tensor:
    negative = y.signbit() & ((code != 0) | (negative_zero and found.negative_zero))
    code = torch.where(negative, code | (1 << (found.bits - 1)), code)
    nan = found.max_code if found.nan_code is None else found.nan_code
    return torch.where(y.isnan(), nan, code).to(torch.uint8)
