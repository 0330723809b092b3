# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts inside autograd Functions: to a quantized record, and back to the values of a `QuantizedTensor`."""

from __future__ import annotations

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.pytorch.randomness import draw_rng_state
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, record_of


def rounded(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    stochastic: bool,
    out: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
) -> Quantized:
    """x cast, with draws from its device's current generator where it is to round stochastically."""
    state = draw_rng_state(x.device) if stochastic else None
    return ops.quantize(x, quantizer, usage=usage, out=out, noop_flag=noop_flag, rng_state=state)


def detached(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of a `QuantizedTensor` inside a Function, where autograd is not watching; other tensors as they are.

    Args:
        dtype: of those values; None for the nominal dtype.
    """
    return ops.dequantize(record_of(x), dtype=dtype) if x.__class__ is QuantizedTensor else x
