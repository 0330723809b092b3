# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The x1's casts. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.shapes import rows_of
from te_dispatch_acme import memory
from te_dispatch_acme.encodings import decode, encode
from te_dispatch_acme.memory import F32

_ONE = np.ones(1, np.float32)
_LARGEST = np.finfo(np.float32).max


def quantize(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    usage: str,
    out: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Quantized:
    """Delayed and current scaling; the manifest keeps out, noop_flag and rng_state away."""
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    values = memory.single("x", x)
    scale = _scale(values, quantizer, amax)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = values * scale
        inverse = _ONE / scale
    codes = encode(scaled, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero)
    row = column = row_scale = column_scale = None
    if usage != "column":
        row = memory.codes("row_data", codes, x.device)
        row_scale = memory.result("row_scale_inv", inverse, torch.float32, x.device)
    if usage != "row":
        matrix = codes.reshape(rows_of(tuple(x.shape)), x.shape[-1])
        column = memory.codes("col_data", matrix.T, x.device)
        # One tensor, one scale: both copies share it.
        column_scale = row_scale
        if column_scale is None:
            column_scale = memory.result("col_scale_inv", inverse, torch.float32, x.device)
    return Quantized(
        row,
        column,
        row_scale,
        column_scale,
        quantizer.encoding,
        "tensor",
        CANONICAL_SCALES,
        tuple(x.shape),
        x.dtype,
        x.device,
    )


def _amax(values: F32) -> F32:
    """max |x|, NaN ignored, Inf kept, 0 for an empty tensor: float32 (1,)."""
    amax: F32 = np.fmax.reduce(np.abs(values), axis=None, initial=np.float32(0)).reshape(1).astype(np.float32)
    return amax


def _scale(values: F32, quantizer: Quantizer, amax: torch.Tensor | None) -> F32:
    """The cast's scale, float32 (1,). A delayed quantizer's amax is accumulated on the way."""
    if isinstance(quantizer, DelayedQuantizer):
        if quantizer.amax is not None:
            seen = np.maximum(memory.single("quantizer.amax", quantizer.amax).reshape(1), _amax(values))
            memory.write(quantizer.amax, seen.reshape(tuple(quantizer.amax.shape)))
        return memory.single("quantizer.scale", quantizer.scale).reshape(1)
    assert isinstance(quantizer, CurrentQuantizer)  # the manifest's requirement
    found = _amax(values) if amax is None else memory.single("amax", amax).reshape(1)
    return _current_scale(found, quantizer)


def _current_scale(amax: F32, quantizer: CurrentQuantizer) -> F32:
    """RN32(max_value / max(amax, epsilon)); 1 where that says nothing, and never infinite."""
    floor = np.maximum(amax, np.float32(quantizer.epsilon))
    if not np.isfinite(amax[0]) or floor[0] == 0:
        return _ONE
    with np.errstate(over="ignore"):
        scale: F32 = np.minimum(np.float32(quantizer.max_value) / floor, _LARGEST)
    if quantizer.power_of_two:
        scale = (scale.view(np.int32) & np.int32(0x7F800000)).view(np.float32)
    return scale


def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """decode(data) * scale_inv, from either copy."""
    checks.dequantize(x, dtype)
    if x.row_data is not None and x.row_scale_inv is not None:
        codes, inverse = x.row_data.numpy(), x.row_scale_inv
    elif x.col_data is not None and x.col_scale_inv is not None:
        codes, inverse = x.col_data.numpy().T, x.col_scale_inv
    else:
        raise Declined("x has neither a row-wise nor a column-wise copy")
    with np.errstate(over="ignore", invalid="ignore"):
        values = decode(codes, x.encoding) * memory.single("x.scale_inv", inverse)
    return memory.result("out", values.reshape(x.shape), memory.dtype_of("dtype", dtype, x.dtype), x.device)
