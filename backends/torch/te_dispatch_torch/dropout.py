# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which elements dropout keeps."""

from __future__ import annotations

import math

import torch

from te_dispatch_torch.random_bits import bits24


def keep_mask(shape: tuple[int, ...], dropout_p: float, rng_state: torch.Tensor) -> torch.Tensor:
    """bool tensor of `shape`, True with probability 1 - dropout_p (to 2^-24).

    Args:
        rng_state: int64 (2,), (seed, offset).
    """
    threshold = round(dropout_p * (1 << 24))
    return (bits24(math.prod(shape), rng_state) >= threshold).view(shape)
