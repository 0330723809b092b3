# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What codes read as, by table: the kit's own, from the encodings' parameters, sharing no kernel's mistake."""

from __future__ import annotations

import functools
import math

import torch

from te_dispatch.numerics.encodings import Encoding, encoding


def value_of(code: int, found: Encoding) -> float:
    """The number that one code stands for: (-1)^s 2^(e - bias) (1 + m / 2^M), subnormal where e is 0."""
    sign = code >> (found.bits - 1)
    exponent = (code >> found.mantissa_bits) & ((1 << found.exponent_bits) - 1)
    mantissa = code & ((1 << found.mantissa_bits) - 1)
    if found.fnuz:
        if code == 0x80:
            return math.nan
    elif found.infinity and exponent == (1 << found.exponent_bits) - 1:
        return math.nan if mantissa else -math.inf if sign else math.inf
    elif found.nan_code is not None and (code & 0x7F) == 0x7F:
        return math.nan
    steps = mantissa if exponent == 0 else mantissa + (1 << found.mantissa_bits)
    value = math.ldexp(steps, max(exponent, 1) - found.bias - found.mantissa_bits)
    return -value if sign else value


@functools.cache
def table(name: str) -> torch.Tensor:
    """float64 (256,): code -> value; codes of four bits repeat."""
    found = encoding(name)
    return torch.tensor([value_of(code & ((1 << found.bits) - 1), found) for code in range(256)], dtype=torch.float64)


def decode(codes: torch.Tensor, name: str) -> torch.Tensor:
    """float64 values of uint8 codes, one code a byte."""
    return table(name)[codes.long()]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes of four bits, two a byte with the even one low, as one a byte: the last dimension doubles."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
