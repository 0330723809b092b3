# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Stochastic rounding to the values of an encoding. Contract: `te_dispatch.ops.quantize`, `rng_state`."""

from __future__ import annotations

import torch

from te_dispatch.numerics.encodings import Encoding
from te_dispatch_torch.random_bits import bits24


class Draws:
    """The random numbers of one cast: its copies' values take them one after the other.

    Args:
        rng_state: int64 (2,), (seed, offset).
    """

    __slots__ = ("rng_state", "taken")

    def __init__(self, rng_state: torch.Tensor) -> None:
        self.rng_state = rng_state
        self.taken = 0

    def rounded(self, y: torch.Tensor, info: Encoding, max_value: float) -> torch.Tensor:
        """fp32 values as values of the encoding: of the two that a magnitude lies between, the larger one with the
        probability of its position between them, to 2^-24. Saturates at `max_value`; a NaN stays one."""
        bits = bits24(y.numel(), self.rng_state, self.taken).view(y.shape)
        self.taken += y.numel()
        magnitude = y.abs().clamp_max(max_value)
        # Values of a binade are a power of two apart, and subnormals as those of the lowest one: scaling is exact.
        exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp_min(1 - info.bias)
        spacing = ((exponent - info.mantissa_bits + 127) << 23).view(torch.float32)
        position = magnitude / spacing
        below = position.floor()
        up = (position - below) * float(1 << 24) > bits
        return torch.copysign((below + up) * spacing, y)
