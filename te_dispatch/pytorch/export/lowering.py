# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized operands in graphs for ONNX.

ONNX has no view of bytes as numbers, which casts of the portable backend work on. So a cast is recorded as the scale's
arithmetic in PyTorch operations and the pair `quantize_linear`, `dequantize_linear`. A `Quantized` holds the values
behind that pair, float32, in place of codes; its products are products of these values in float32.

QuantizeLinear divides by its scale where eager multiplies by the inverse, which falls on the other side of a tie now
and then, above all in 16-bit inputs. So the product with the scale is an operation of its own and QuantizeLinear's
scale is 1: codes are those of eager, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    Quantizer,
)
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import Gemm

_FP32_MAX = torch.finfo(torch.float32).max

#: The values of E8M0 codes but NaN's, 255; code 127 is 1.
_BIAS = 127
_POWERS = torch.tensor([2.0 ** (code - _BIAS) for code in range(255)])


def lowered(operator: Operator, chosen: Callable[..., Any]) -> Callable[..., Any]:
    """An operator as a graph for ONNX records it, with every argument by position.

    Args:
        chosen: the implementation that the policy chose, made of PyTorch operations.
    """
    lowering = _LOWERINGS.get(operator.name)
    return chosen if lowering is None else functools.partial(lowering, chosen)


def _quantize(
    chosen: Callable[..., Any],
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    out: Quantized | None,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
    rng_state: torch.Tensor | None,
) -> Quantized:
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    if out is not None or rng_state is not None:
        raise NotImplementedError("onnx_export: quantize with out or rng_state is not supported, only with None")
    x32 = x.to(torch.float32)
    if isinstance(quantizer, DelayedQuantizer):
        values, scale_inv = _per_tensor(x32, quantizer, quantizer.scale)
    elif isinstance(quantizer, CurrentQuantizer):
        scale = _scale_from_amax(_amax(x32) if amax is None else amax, quantizer)
        values, scale_inv = _per_tensor(x32, quantizer, scale)
    elif isinstance(quantizer, BlockQuantizer):
        values, scale_inv = _blocks(x32, quantizer)
    elif isinstance(quantizer, (MXFP8Quantizer, MXFP8TileQuantizer)):
        values, scale_inv = _mxfp8(x32, quantizer)
    else:
        raise NotImplementedError(
            f"onnx_export: {quantizer.kind} quantization is not supported: 4-bit floats and their packing have no ONNX "
            "operators that runtimes implement; export under an FP8 recipe, or in high precision"
        )
    return Quantized(
        values, None, scale_inv, None, quantizer.encoding, quantizer.scaling, CANONICAL_SCALES, tuple(x.shape), x.dtype,
        x.device,
    )  # fmt: skip


def _pair(scaled: torch.Tensor, scale_inv: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """The values behind a cast of float32 that its scale was multiplied into; scale_inv float32 ()."""
    if quantizer.common:  # a smaller range than the encoding's, at which the operator saturates
        scaled = scaled.clamp(-quantizer.max_value, quantizer.max_value)
    codes = torch.ops.te_dispatch.quantize_linear(scaled, _one(scaled), quantizer.encoding)
    return torch.ops.te_dispatch.dequantize_linear(codes, scale_inv, quantizer.encoding)  # type: ignore[no-any-return]


def _one(x: torch.Tensor) -> torch.Tensor:
    return torch.ones((), device=x.device)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """A division: runtimes may compute a Reciprocal to fewer digits."""
    return torch.ones_like(scale) / scale


def _per_tensor(x: torch.Tensor, quantizer: Quantizer, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_inv = _inverse(scale)
    return _pair(x * scale, scale_inv.reshape(()), quantizer), scale_inv


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(x), 0.0, x.abs())


def _amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| (1,): NaN ignored."""
    return _without_nan(x).max().reshape(1)


def _scale_from_amax(amax: torch.Tensor, quantizer: CurrentQuantizer | BlockQuantizer) -> torch.Tensor:
    """The rule of `CurrentQuantizer`, in its order of roundings."""
    if quantizer.epsilon > 0.0:
        amax = amax.clamp_min(quantizer.epsilon)
    scale = (torch.full_like(amax, quantizer.max_value) / amax).clamp_max(_FP32_MAX)
    if quantizer.power_of_two:
        code, powers = _ceil_exponent(scale)
        above = powers[code] > scale
        scale = powers[code - above.to(torch.int64)]
    usable = (amax > 0) & (amax < torch.inf)
    return torch.where(usable, scale, 1.0)


def _ceil_exponent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(code, powers): the smallest E8M0 code of a value of x or more, 254 if there is none; `_POWERS` on x's device.

    ONNX has no access to an exponent. A logarithm finds it but for one place, whatever its last digits; comparisons
    with the powers of two, which are constants, find the place.
    """
    powers = _POWERS.to(x.device)
    code = (torch.log2(x).ceil().clamp(-_BIAS, _BIAS) + _BIAS).to(torch.int64)
    code = (code + (powers[code] < x).to(torch.int64)).clamp_max(254)
    below = (code - 1).clamp_min(0)
    return torch.where(powers[below] >= x, below, code), powers


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, columns, 0, rows)) if rows or columns else x


def _divided(x: torch.Tensor, size: int, two_d: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x in blocks of `size` along its last dimension, or in tiles, and their amaxes: blocks are one dimension, tiles
    two. Edge blocks are padded with zeros, which no amax sees."""
    matrix = x.reshape(-1, x.shape[-1])
    rows, columns = matrix.shape
    padded = _padded(matrix, -rows % size if two_d else 0, -columns % size)
    lines = (size,) if two_d else ()
    blocks = padded.reshape(-1, *lines, padded.shape[1] // size, size)
    return blocks, _without_nan(blocks).amax((1, 3) if two_d else -1, keepdim=True)


def _together(blocks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What `_divided` took apart, of the shape of x."""
    columns = x.shape[-1]
    padded = blocks.reshape(-1, blocks.shape[-2] * blocks.shape[-1])
    return padded[: x.numel() // max(columns, 1), :columns].reshape(x.shape)


def _blocks(x: torch.Tensor, quantizer: BlockQuantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 blocks or 128x128 tiles of the row-wise copy."""
    blocks, amax = _divided(x, 128, quantizer.two_d)
    scale = _scale_from_amax(amax, quantizer)
    scale_inv = _inverse(scale)
    return _together(_pair(blocks * scale, _one(x), quantizer) * scale_inv, x), scale_inv


def _mxfp8(x: torch.Tensor, quantizer: MXFP8Quantizer | MXFP8TileQuantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 or 32x32 tiles of the row-wise copy, whose E8M0 scales are held as their values."""
    blocks, amax = _divided(x, 32, isinstance(quantizer, MXFP8TileQuantizer))
    code, powers = _ceil_exponent(amax / torch.full_like(amax, quantizer.max_value))
    # The inverse of a code's value is that of the code mirrored at 1.
    scale_inv = powers[code]
    values = _pair(blocks * powers[2 * _BIAS - code], _one(x), quantizer) * scale_inv
    return _together(values, x), scale_inv


def _values(x: Any) -> Any:
    return x.row_data if isinstance(x, Quantized) else x


def _gemm(
    chosen: Callable[..., Any],
    a: Any,
    b: Any,
    layout: str,
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    aux: Any,
    aux_quantizer: Quantizer | None,
    out_dtype: torch.dtype | None,
    out_quantizer: Quantizer | None,
    split_accumulator: bool | None,
) -> Gemm:
    if not isinstance(a, Quantized):
        result: Gemm = chosen(
            a, b, layout, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer,
            split_accumulator,
        )  # fmt: skip
        return result
    return ops.gemm(
        _values(a), _values(b), layout=layout, alpha=alpha, out=out, accumulate=accumulate, bias=bias,
        epilogue=epilogue, aux=_values(aux), aux_quantizer=aux_quantizer,
        out_dtype=out_dtype or (a.dtype if out is None else out.dtype), out_quantizer=out_quantizer,
    )  # fmt: skip


def _dequantize(chosen: Callable[..., Any], x: Quantized, dtype: torch.dtype | None) -> torch.Tensor:
    values: torch.Tensor = _values(x)
    return values.to(dtype or x.dtype)


def _as_it_is(chosen: Callable[..., Any], x: Quantized, *_: Any) -> Quantized:
    """Other copies and layouts of scales: products read the values."""
    return x


def _attention(chosen: Callable[..., Any], *args: Any) -> Any:
    if args[_ATTENTION_DROPOUT]:
        raise NotImplementedError(_DROPOUT)
    return chosen(*args)


def _dropout_add(chosen: Callable[..., Any], *_: Any) -> Any:
    raise NotImplementedError(_DROPOUT)


_DROPOUT = "onnx_export: dropout is not supported; call model.eval() before the export, or set its probability to 0"
_ATTENTION_DROPOUT = list(OPERATORS["attention_fwd"].signature.parameters).index("dropout_p")

_LOWERINGS: dict[str, Callable[..., Any]] = {
    "attention_fwd": _attention,
    "dequantize": _dequantize,
    "dropout_add_fwd": _dropout_add,
    "gemm": _gemm,
    "quantize": _quantize,
    "relayout_scales": _as_it_is,
    "transpose_quantized": _as_it_is,
}
