# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dtypes, encodings and casts as the integers that csrc/common/dtypes.h defines."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantizers import Quantizer

DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ENCODINGS: dict[str, int] = {"e4m3fn": 0, "e5m2": 1, "e4m3fnuz": 2, "e5m2fnuz": 3, "e2m1": 4}
COMMON = 8
USAGES: dict[str, int] = {"row": 1, "column": 2, "both": 3}


def cast_facts(quantizer: Quantizer) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
    """What a cast by this quantizer depends on: constants, and the tensors that it reads and writes."""
    kind = quantizer.kind
    if kind == "delayed":
        return (kind, quantizer.encoding, quantizer.common), (quantizer.scale, quantizer.amax)  # type: ignore[union-attr]
    if kind == "mxfp8":
        return (kind, quantizer.encoding, quantizer.common), ()
    if kind == "nvfp4":
        return (kind, quantizer.encoding, quantizer.common, quantizer.two_d), ()  # type: ignore[union-attr]
    epsilon, power_of_two = quantizer.epsilon, quantizer.power_of_two  # type: ignore[union-attr]
    if kind == "current":
        return (kind, quantizer.encoding, quantizer.common, epsilon, power_of_two), ()
    how = quantizer.two_d, quantizer.scale_layout  # type: ignore[union-attr]
    return (kind, quantizer.encoding, quantizer.common, epsilon, power_of_two, *how), ()


def cast_code(quantizer: Quantizer) -> int:
    """The encoding of a quantizer's cast, and whether it clamps at the common maximum."""
    return ENCODINGS[quantizer.encoding] + COMMON if quantizer.common else ENCODINGS[quantizer.encoding]
