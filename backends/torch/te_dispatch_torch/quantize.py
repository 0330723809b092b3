# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts to FP8 and FP4 and back. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    KINDS,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch.ops.shapes import rows_of
from te_dispatch_torch import blocks, four_over_six
from te_dispatch_torch.encodings import decode, encode_
from te_dispatch_torch.scales_layout import canonical, laid_out
from te_dispatch_torch.scaling import amax_of, scale_from_amax
from te_dispatch_torch.stochastic import Draws

_COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


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
    """Every cast of `te_dispatch.ops.quantize`."""
    checks.quantize(x, quantizer, usage, out, noop_flag, amax, rng_state)
    new = cast(x, quantizer, usage, x.dtype, amax, noop_flag, None if rng_state is None else Draws(rng_state))
    return new if out is None else _deliver(new, out, noop_flag)


def cast(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    dtype: torch.dtype,
    amax: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    draws: Draws | None = None,
) -> Quantized:
    """`quantize` into fresh memory, with the result's nominal dtype given: what fused operators cast through."""
    if isinstance(quantizer, DelayedQuantizer):
        if quantizer.amax is not None:
            _accumulate(quantizer.amax, amax_of(x), noop_flag)
        return _cast_tensor(x, quantizer, quantizer.scale, usage, dtype, draws)
    if isinstance(quantizer, CurrentQuantizer):
        found = amax_of(x) if amax is None else amax
        scale = scale_from_amax(found, quantizer.max_value, quantizer.epsilon, quantizer.power_of_two)
        return _cast_tensor(x, quantizer, scale, usage, dtype, draws)
    if isinstance(quantizer, BlockQuantizer):
        if quantizer.two_d:
            return _record(x, quantizer, usage, dtype, blocks.cast_blocks_2d(x, quantizer, draws))
        return _record(x, quantizer, usage, dtype, blocks.cast_blocks_1d(x, quantizer, usage, draws))
    if isinstance(quantizer, MXFP8Quantizer):
        return _record(x, quantizer, usage, dtype, blocks.cast_mxfp8(x, quantizer, usage, draws))
    if isinstance(quantizer, MXFP8TileQuantizer):
        return _record(x, quantizer, usage, dtype, blocks.cast_mxfp8_2d(x, quantizer, draws))
    if isinstance(quantizer, NVFP4FourOverSixQuantizer):
        parts, global_scale_inv = four_over_six.cast(x, quantizer, usage, amax)
        return _record(x, quantizer, usage, dtype, parts, global_scale_inv)
    if isinstance(quantizer, NVFP4Quantizer):
        parts, global_scale_inv = blocks.cast_nvfp4(x, quantizer, usage, amax, draws)
        return _record(x, quantizer, usage, dtype, parts, global_scale_inv)
    if isinstance(quantizer, NVFP4HadamardQuantizer):
        parts, global_scale_inv = blocks.cast_nvfp4_rotated(x, quantizer, usage, draws)
        return _record(x, quantizer, usage, dtype, parts, global_scale_inv)
    raise ValueError(f"quantizer must be of one of the kinds {', '.join(KINDS)}, got {type(quantizer).__name__}")


def _accumulate(into: torch.Tensor, amax: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
    if noop_flag is not None:
        amax = torch.where(noop_flag != 0, 0.0, amax)
    into.copy_(torch.maximum(into, amax.view(into.shape)))


def _deliver(new: Quantized, out: Quantized, noop_flag: torch.Tensor | None) -> Quantized:
    for name in _COPIES:
        source, target = getattr(new, name), getattr(out, name)
        if source is not None and target is not None:
            if name == "global_scale_inv" and new.scaling == "nvfp4_rht":
                made = slice(0 if new.row_data is not None else 1, 2 if new.col_data is not None else 1)
                source, target = source[made], target[made]
            target.copy_(source if noop_flag is None else torch.where(noop_flag != 0, target, source))
    return out


def _cast_tensor(
    x: torch.Tensor,
    quantizer: Quantizer,
    scale: torch.Tensor,
    usage: str,
    dtype: torch.dtype,
    draws: Draws | None,
) -> Quantized:
    # A bf16 tensor times a (1,) fp32 tensor promotes: the product is formed in fp32, without an fp32 copy of x.
    codes = encode_(x * scale, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    scale_inv = scale.reciprocal()
    # A product keeps its operand's strides; a record's data is contiguous.
    row = codes.contiguous() if usage != "column" else None
    column = None if usage == "row" else blocks.transposed(codes.reshape(rows_of(tuple(x.shape)), x.shape[-1]))
    parts = (row, column, None if row is None else scale_inv, None if column is None else scale_inv)
    return _record(x, quantizer, usage, dtype, parts)


def _record(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    dtype: torch.dtype,
    parts: blocks.Parts,
    global_scale_inv: torch.Tensor | None = None,
) -> Quantized:
    row, column, row_scale, col_scale = parts
    if usage == "column":
        row, row_scale = None, None
    elif usage == "row":
        column, col_scale = None, None
    made = Quantized(
        row, column, row_scale, col_scale, quantizer.encoding, quantizer.scaling, CANONICAL_SCALES, tuple(x.shape),
        dtype, x.device, global_scale_inv,
    )  # fmt: skip
    return laid_out(made, quantizer.scale_layout)


def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    """A cast and the sum over rows."""
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    rows = x.reshape(rows_of(tuple(x.shape)), x.shape[-1])
    dbias = rows.sum(0, dtype=torch.float32).to(bias_dtype or x.dtype)
    return QuantizeDbias(cast(x, quantizer, usage, x.dtype), dbias)


def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High-precision values, of the logical shape."""
    checks.dequantize(x, dtype)
    found = values(x, "row" if x.row_data is not None else "column")
    return found.to(dtype or x.dtype).contiguous()


def values(x: Quantized, usage: str) -> torch.Tensor:
    """float32 values of one copy, of the logical shape: RN32(decode(data) * scale_inv)."""
    x = canonical(x)
    row = usage == "row"
    data, scale = (x.row_data, x.row_scale_inv) if row else (x.col_data, x.col_scale_inv)
    if data is None or scale is None:
        raise ValueError(f"x has no {usage}-wise copy")
    if x.scaling == "tensor":
        found = decode(data, x.encoding) * scale
    else:
        found = blocks.block_values(x, data, scale, row)
    if not row and x.scaling != "mxfp8":
        found = found.t()
    return found.reshape(x.shape)


def transpose_quantized(x: Quantized) -> Quantized:
    """Add the column-wise copy by moving bytes."""
    checks.transpose_quantized(x)
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    column = blocks.transposed(x.row_data.reshape(x.rows(), x.shape[-1]))
    scale = x.row_scale_inv if x.scaling == "tensor" else blocks.transposed(x.row_scale_inv)
    return Quantized(
        x.row_data, column, x.row_scale_inv, scale, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )


def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """One cast per part."""
    checks.split_quantize(x, splits, quantizers, usage)
    return [cast(part, q, usage, x.dtype) for part, q in zip(x.split(list(splits)), quantizers, strict=True)]


def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """One cast per tensor."""
    checks.multi_tensor_quantize(xs, quantizers, usage)
    return [cast(x, q, usage, x.dtype) for x, q in zip(xs, quantizers, strict=True)]


def pad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Append zero rows to every part."""
    checks.pad_rows(x, splits, padded_splits, False)
    parts = x.split(list(splits))
    padded = [
        torch.cat((part, part.new_zeros((after - before, x.shape[-1]))))
        for part, before, after in zip(parts, splits, padded_splits, strict=True)
    ]
    return torch.cat(padded) if padded else x.new_empty((0, x.shape[-1]))


def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Undo `pad_rows`."""
    checks.pad_rows(x, splits, padded_splits, True)
    parts = x.split(list(padded_splits))
    kept = [part[:rows] for part, rows in zip(parts, splits, strict=True)]
    return torch.cat(kept) if kept else x.new_empty((0, x.shape[-1]))
