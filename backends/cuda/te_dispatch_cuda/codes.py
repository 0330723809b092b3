# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dtypes, encodings and casts as the integers that csrc/common/dtypes.h defines."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer

DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ENCODINGS: dict[str, int] = {"e4m3fn": 0, "e5m2": 1, "e4m3fnuz": 2, "e5m2fnuz": 3, "e2m1": 4}
COMMON = 8
USAGES: dict[str, int] = {"row": 1, "column": 2, "both": 3}


def state_of(quantizer: Quantizer | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a cast by this quantizer reads and writes: scale and amax of one with delayed scaling."""
    return (quantizer.scale, quantizer.amax) if isinstance(quantizer, DelayedQuantizer) else ()


def cast_code(quantizer: Quantizer) -> int:
    """The encoding of a quantizer's cast, and whether it clamps at the common maximum."""
    return ENCODINGS[quantizer.encoding] + COMMON if quantizer.common else ENCODINGS[quantizer.encoding]
