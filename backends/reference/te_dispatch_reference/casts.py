# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The casts of every quantizer, on float32 arrays, and what a `Quantized` reads as.

Every product and quotient below is one float32 operation, in the order the quantizers' docstrings write it. Column-wise
copies are the row-wise cast of the transposed matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from te_dispatch.numerics import hadamard
from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS, Quantized
from te_dispatch.numerics.quantizers import (
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
from te_dispatch.ops.shapes import USAGES, ceil_div, rows_of
from te_dispatch_reference import host, philox
from te_dispatch_reference.encodings import Codes, decode, encode, pack_nibbles, stochastic, unpack_nibbles
from te_dispatch_reference.scale_layouts import canonical_scales, to_layout

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LARGEST = np.finfo(np.float32).max


def magnitudes(x: F32) -> F32:
    """|x|, with 0 for NaN. Not numpy.fmax later on: a signalling NaN makes it forget the maximum so far."""
    return np.where(np.isnan(x), np.float32(0), np.abs(x))


def amax_of(x: F32) -> np.float32:
    """max |x|: NaN ignored, Inf kept, 0 if nothing is left."""
    return np.float32(magnitudes(x).max(initial=0))


def scale_of(amax: F32, max_value: float, *, epsilon: float = 0.0, power_of_two: bool = False) -> F32:
    """RN32(max_value / max(amax, epsilon)), elementwise; 1 where that amax is 0, Inf or NaN."""
    floored = np.maximum(np.float32(amax), np.float32(epsilon))
    usable = np.isfinite(floored) & (floored > 0)
    with np.errstate(over="ignore"):
        scale = np.float32(max_value) / np.where(usable, floored, np.float32(1))
    scale = np.minimum(scale, LARGEST)
    if power_of_two:
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
    return np.where(usable, scale, np.float32(1)).astype(np.float32)


def times(x: F32, scale: F32) -> F32:
    """RN32(x * scale)."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return np.multiply(x, scale, dtype=np.float32)


def over(x: F32, divisor: F32) -> F32:
    """RN32(x / divisor)."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        return np.divide(x, divisor, dtype=np.float32)


class Draws:
    """The random numbers of one cast with stochastic rounding: its copies' elements take them one after the other."""

    def __init__(self, rng_state: torch.Tensor) -> None:
        self.seed, self.offset = host.array(rng_state).tolist()
        self.taken = 0

    def take(self, shape: tuple[int, ...]) -> F64:
        """Uniform in [0, 1)."""
        index = self.taken + np.arange(np.prod(shape, dtype=np.int64), dtype=np.int64)
        self.taken += index.size
        return philox.uniform(self.seed, self.offset, index).reshape(shape)


def _codes(scaled: F32, quantizer: Quantizer, draws: Draws | None) -> Codes:
    if draws is not None:
        scaled = stochastic(scaled, encoding(quantizer.encoding), quantizer.max_value, draws.take(scaled.shape))
    return encode(scaled, encoding(quantizer.encoding), quantizer.max_value, quantizer.keeps_negative_zero)


def block_amax(x: F32, rows: int, columns: int) -> F32:
    """amax of every (rows, columns) tile of a matrix; edge tiles are partial."""
    m, k = x.shape
    padded = np.zeros((ceil_div(m, rows) * rows, ceil_div(k, columns) * columns), np.float32)
    padded[:m, :k] = magnitudes(x)
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return tiles.max(axis=(1, 3), initial=0)


def spread(per_block: F32, rows: int, columns: int, shape: tuple[int, ...]) -> F32:
    """Repeat one value per (rows, columns) tile over its elements."""
    return np.repeat(np.repeat(per_block, rows, 0), columns, 1)[: shape[0], : shape[1]]


class Copy(NamedTuple):
    """One copy of a quantized matrix, blocks along its last dimension."""

    data: Codes
    scale_inv: NDArray[np.float32] | NDArray[np.uint8]


def cast_blocks(x: F32, quantizer: BlockQuantizer, draws: Draws | None) -> Copy:
    rows = 128 if quantizer.two_d else 1
    scale = scale_of(
        block_amax(x, rows, 128),
        quantizer.max_value,
        epsilon=quantizer.epsilon,
        power_of_two=quantizer.power_of_two,
    )
    return Copy(_codes(times(x, spread(scale, rows, 128, x.shape)), quantizer, draws), over(np.float32(1), scale))


def e8m0_scale(amax: F32, max_value: float) -> Codes:
    """Biased exponents: ceil(log2(RN32(amax / max_value))) + 127; 0xFF for NaN, 0xFE for Inf, 0x00 for 0."""
    ratio = over(amax, np.float32(max_value))
    fraction, exponent = np.frexp(ratio)  # ratio = fraction * 2^exponent with fraction in [0.5, 1)
    ceiling = exponent - (fraction == 0.5)
    code = np.where(ratio > 0, np.clip(ceiling + 127, 0x00, 0xFE), 0x00)
    code = np.where(np.isinf(amax), 0xFE, np.where(np.isnan(amax), 0xFF, code))
    return code.astype(np.uint8)


def cast_mx(x: F32, quantizer: MXFP8Quantizer, draws: Draws | None) -> Copy:
    exponent = e8m0_scale(block_amax(x, 1, 32), quantizer.max_value)
    scale = np.ldexp(np.float32(1), 127 - exponent.astype(np.int32))
    return Copy(_codes(times(x, spread(scale, 1, 32, x.shape)), quantizer, draws), exponent)


def cast_mx_tiles(x: F32, quantizer: MXFP8TileQuantizer, draws: Draws | None) -> tuple[Codes, Codes]:
    """Codes (M, K), and the exponent of each 32x32 tile."""
    exponent = e8m0_scale(block_amax(x, 32, 32), quantizer.max_value)
    scale = np.ldexp(np.float32(1), 127 - exponent.astype(np.int32))
    return _codes(times(x, spread(scale, 32, 32, x.shape)), quantizer, draws), exponent


def nvfp4_scale(amax: np.float32, scale_max: float = 448.0) -> F32:
    """(1,): S of the quantizers' docstrings."""
    return scale_of(np.array([amax]), scale_max * 6.0)


def rotated(x: F32, to_bf16: bool) -> F32:
    """Every 16 elements of a row times the random Hadamard matrix: summed in float64, rounded to float32, then perhaps
    to bfloat16."""
    m, k = x.shape
    with np.errstate(over="ignore", invalid="ignore"):
        sums = x.reshape(m, k // hadamard.SIZE, hadamard.SIZE).astype(np.float64) @ np.array(hadamard.matrix())
        found = sums.reshape(m, k).astype(np.float32)
    return host.single(host.rounded(found, torch.bfloat16)) if to_bf16 else found


def cast_nvfp4(
    x: F32, quantizer: NVFP4Quantizer | NVFP4HadamardQuantizer, global_scale: F32, draws: Draws | None
) -> Copy:
    """Where a block's scale rounds to 0, whatever its codes say reads as 0; they are written as 0."""
    rows = 16 if isinstance(quantizer, NVFP4Quantizer) and quantizer.two_d else 1
    fraction = over(times(block_amax(x, rows, 16), global_scale), np.float32(6))
    block = encode(fraction, encoding("e4m3fn"), 448.0, True)
    divisor = spread(decode(block, "e4m3fn").astype(np.float32), rows, 16, x.shape)
    quotient = over(times(x, global_scale), divisor)
    codes = _codes(np.where(divisor == 0, np.float32(0), quotient).astype(np.float32), quantizer, draws)
    per_row = np.repeat(block, rows, 0)[: x.shape[0]]
    return Copy(pack_nibbles(codes), per_row)


def _halves(x: F32) -> F32:
    """Sums of the last dimension, a power of two long: each element and the one half the length further, until one is
    left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        with np.errstate(over="ignore", invalid="ignore"):
            x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _block_errors(error: F32, two_d: bool) -> F32:
    """Sums over each 1x16 block of a matrix, or 16x16 tile; edge blocks as if zeros followed."""
    m, k = error.shape
    rows = 16 if two_d else 1
    down, across = ceil_div(m, rows), ceil_div(k, 16)
    padded = np.zeros((down * rows, across * 16), np.float32)
    padded[:m, :k] = error
    of_rows = _halves(padded.reshape(down, rows, across, 16))
    return _halves(of_rows.swapaxes(1, 2))


def cast_four_over_six(x: F32, quantizer: NVFP4FourOverSixQuantizer, global_scale: F32) -> tuple[Codes, Codes]:
    """Codes, not packed, and the scale of each block."""
    rows = 16 if quantizer.two_d else 1
    scaled = times(x, global_scale)
    six = over(times(block_amax(x, rows, 16), global_scale), np.float32(6))
    found = []
    for wanted in (six, times(six, np.float32(1.5))):
        block = encode(wanted, encoding("e4m3fn"), 448.0, True)
        divisor = spread(decode(block, "e4m3fn").astype(np.float32), rows, 16, x.shape)
        quotient = np.where(divisor == 0, np.float32(0), over(scaled, divisor)).astype(np.float32)
        codes = _codes(quotient, quantizer, None)
        with np.errstate(over="ignore", invalid="ignore"):
            error = times(decode(codes, quantizer.encoding).astype(np.float32), divisor) - scaled
        error = np.abs(error) if quantizer.error == "MAE" else times(error, error)
        found.append((codes, block, _block_errors(error, quantizer.two_d)))
    (codes6, block6, error6), (codes4, block4, error4) = found
    four = error4 < error6
    return np.where(spread(four, rows, 16, x.shape), codes4, codes6), np.where(four, block4, block6)


def _four_over_six(
    x: F32, quantizer: NVFP4FourOverSixQuantizer, amax: np.float32, row: bool, column: bool
) -> CastArrays:
    global_scale = nvfp4_scale(amax, quantizer.scale_max)
    copies: list[Copy | None] = [None, None]
    made = cast_four_over_six(x, quantizer, global_scale) if row or quantizer.two_d else None
    if row and made is not None:
        copies[0] = _packed_copy(*made, quantizer.two_d)
    if column:
        tiles = quantizer.two_d and made is not None
        codes, block = (made[0].T, made[1].T) if tiles else cast_four_over_six(x.T, quantizer, global_scale)
        copies[1] = _packed_copy(codes, block, quantizer.two_d)
    return _both(copies[0], copies[1], over(np.float32(1), global_scale))


def _packed_copy(codes: Codes, block: Codes, two_d: bool) -> Copy:
    per_row = np.repeat(block, 16, 0)[: codes.shape[0]] if two_d else block
    return Copy(pack_nibbles(codes), per_row)


class CastArrays(NamedTuple):
    """Every array of a `Quantized`, flattened to (M, K); one scale is shared by both copies for tensor scaling."""

    row_data: Codes | None
    col_data: Codes | None
    row_scale_inv: NDArray[np.float32] | NDArray[np.uint8] | None
    col_scale_inv: NDArray[np.float32] | NDArray[np.uint8] | None
    global_scale_inv: F32 | None


def check_usage(usage: str) -> None:
    if usage not in USAGES:
        raise ValueError(f"usage: got {usage!r}, expected one of {', '.join(USAGES)}")


def cast(
    x: F32,
    quantizer: Quantizer,
    usage: str,
    amax: torch.Tensor | None = None,
    draws: Draws | None = None,
    from_bf16: bool = False,
) -> CastArrays:
    """Cast a float32 matrix (M, K). Max-accumulates into a `DelayedQuantizer`'s amax.

    Args:
        draws: for stochastic rounding.
        from_bf16: what is cast are bfloat16 numbers.
    """
    row, column = usage != "column", usage != "row"
    if isinstance(quantizer, (DelayedQuantizer, CurrentQuantizer)):
        scale = _tensor_scale(x, quantizer, amax)
        data = _codes(times(x, scale), quantizer, draws)
        inverse = over(np.float32(1), scale)
        return CastArrays(
            data if row else None,
            data.T if column else None,
            inverse if row else None,
            inverse if column else None,
            None,
        )
    if isinstance(quantizer, BlockQuantizer):
        if quantizer.two_d:  # both copies are one matrix, drawn for once
            data, scale_inv = cast_blocks(x, quantizer, draws)
            return _both(Copy(data, scale_inv) if row else None, Copy(data.T, scale_inv.T) if column else None, None)
        copies = [cast_blocks(m, quantizer, draws) if wanted else None for m, wanted in ((x, row), (x.T, column))]
        return _both(copies[0], copies[1], None)
    if isinstance(quantizer, MXFP8Quantizer):
        along_k = cast_mx(x, quantizer, draws) if row else None
        along_m = cast_mx(x.T, quantizer, draws) if column else None
        # The column-wise copy lies untransposed: only its blocks run along M.
        return _both(along_k, Copy(along_m.data.T, along_m.scale_inv.T) if along_m else None, None)
    if isinstance(quantizer, MXFP8TileQuantizer):
        data, exponent = cast_mx_tiles(x, quantizer, draws)
        m, k = x.shape
        return CastArrays(
            data if row else None,
            data if column else None,
            np.repeat(exponent, 32, 0)[:m] if row else None,
            np.repeat(exponent, 32, 1)[:, :k] if column else None,
            None,
        )
    if isinstance(quantizer, NVFP4FourOverSixQuantizer):
        return _four_over_six(x, quantizer, amax_of(x) if amax is None else host.single(amax).reshape(()), row, column)
    if isinstance(quantizer, NVFP4Quantizer):
        global_scale = nvfp4_scale(amax_of(x) if amax is None else host.single(amax).reshape(()))
        copies = [
            cast_nvfp4(m, quantizer, global_scale, draws) if wanted else None for m, wanted in ((x, row), (x.T, column))
        ]
        return _both(copies[0], copies[1], over(np.float32(1), global_scale))
    if isinstance(quantizer, NVFP4HadamardQuantizer):
        made: list[Copy | None] = [None, None]
        inverses = np.zeros(2, np.float32)
        for i, source in enumerate((x if row else None, rotated(x.T, from_bf16) if column else None)):
            if source is not None:
                global_scale = nvfp4_scale(amax_of(source))
                made[i] = cast_nvfp4(source, quantizer, global_scale, draws)
                inverses[i : i + 1] = over(np.float32(1), global_scale)
        return _both(made[0], made[1], inverses)
    raise ValueError(f"quantizer: got {type(quantizer).__name__}, expected one of te_dispatch.numerics.quantizers")


def _both(row: Copy | None, column: Copy | None, global_scale_inv: F32 | None) -> CastArrays:
    return CastArrays(
        row.data if row else None,
        column.data if column else None,
        row.scale_inv if row else None,
        column.scale_inv if column else None,
        global_scale_inv,
    )


def _tensor_scale(x: F32, quantizer: DelayedQuantizer | CurrentQuantizer, amax: torch.Tensor | None) -> F32:
    if isinstance(quantizer, DelayedQuantizer):
        if quantizer.amax is not None:
            host.write(quantizer.amax, np.maximum(magnitudes(host.single(quantizer.amax)), amax_of(x)))
        return host.single(quantizer.scale).reshape(1)
    used = np.array([amax_of(x)]) if amax is None else host.single(amax).reshape(1)
    return scale_of(used, quantizer.max_value, epsilon=quantizer.epsilon, power_of_two=quantizer.power_of_two)


def quantized(
    x: F32,
    shape: tuple[int, ...],
    quantizer: Quantizer,
    usage: str,
    dtype: torch.dtype,
    device: torch.device,
    amax: torch.Tensor | None = None,
    draws: Draws | None = None,
    from_bf16: bool = False,
    intermediate: bool = False,
) -> Quantized:
    """Cast float32 values of a logical shape into a fresh record. This is how every operator's quantizer works.

    Args:
        intermediate: the record is no result of the operator, so it is not allocated as one.
    """
    check_usage(usage)
    if not shape:
        raise ValueError("x: got a tensor without dimensions, expected (..., K)")
    arrays = cast(x.reshape(rows_of(shape), shape[-1]), quantizer, usage, amax, draws, from_bf16)

    def give(role: str, values: Codes | F32 | None) -> torch.Tensor | None:
        if values is None:
            return None
        of = torch.uint8 if values.dtype == np.uint8 else torch.float32
        if intermediate:
            return host.write(torch.empty(values.shape, dtype=of, device=device), values)
        return host.result(role, values, of, device)

    row_data = arrays.row_data
    if row_data is not None:
        row_data = row_data.reshape(*shape[:-1], row_data.shape[-1])

    def give_scales(role: str, scales: Codes | F32 | None, column: bool) -> torch.Tensor | None:
        laid_out = None if scales is None else to_layout(scales, quantizer.scale_layout, quantizer.scaling, column)
        return give(role, laid_out)

    row_scale = give_scales("row_scale_inv", arrays.row_scale_inv, False)
    shared = quantizer.scaling == "tensor" and row_scale is not None and arrays.col_scale_inv is not None
    return Quantized(
        give("row_data", row_data),
        give("col_data", arrays.col_data),
        row_scale,
        row_scale if shared else give_scales("col_scale_inv", arrays.col_scale_inv, True),
        quantizer.encoding,
        quantizer.scaling,
        quantizer.scale_layout,
        shape,
        dtype,
        device,
        give("global_scale_inv", arrays.global_scale_inv),
    )


def factors(x: Quantized, column: bool) -> tuple[F64, F32]:
    """Of one copy: decoded codes (M, K), and what each is multiplied with, float32, broadcastable to (M, K)."""
    m, k = rows_of(x.shape), x.shape[-1]
    data, scales = (x.col_data, x.col_scale_inv) if column else (x.row_data, x.row_scale_inv)
    if data is None or scales is None:
        raise ValueError(f"x: has no {'column' if column else 'row'}-wise copy")
    transposed = column and x.scaling != "mxfp8"
    shape = (k, m) if transposed else (m, k)
    scale = host.array(scales)
    if x.scale_layout != CANONICAL_SCALES:
        scale = canonical_scales(scale, x, column)
    codes = host.array(data)
    if x.scaling in NVFP4_SCALINGS:
        codes = unpack_nibbles(codes.reshape(shape[0], ceil_div(shape[1], 2)), shape[1])
        assert x.global_scale_inv is not None
        whole = host.single(x.global_scale_inv)[-1 if column else 0]
        per_block = times(decode(scale, "e4m3fn").astype(np.float32), whole)
        spread_scale = spread(per_block, 1, 16, shape)
    elif x.scaling == "tensor":
        spread_scale = scale.reshape(1, 1)
    elif x.scaling == "mxfp8":
        power = np.ldexp(np.float32(1), np.minimum(scale, 0xFE).astype(np.int32) - 127)
        power = np.where(scale == 0xFF, np.float32(np.nan), power).astype(np.float32)
        spread_scale = spread(power, *((32, 1) if column else (1, 32)), shape)
    else:
        spread_scale = spread(scale, 128 if x.scaling == "block_2d" else 1, 128, shape)
    values = decode(codes.reshape(shape), x.encoding)
    return (values.T, spread_scale.T) if transposed else (values, spread_scale)


def matrix(x: Quantized, prefer_column: bool) -> F64:
    """The values a `Quantized` stands for, (M, K), in float64 (exact: at most 4 + 24 + 24 significant bits)."""
    column = x.row_data is None or (prefer_column and x.col_data is not None)
    values, scale = factors(x, column)
    with np.errstate(invalid="ignore"):
        return values * scale


def single_values(x: Quantized) -> F32:
    """The values a `Quantized` stands for as `dequantize` defines them: RN32(decode(data) * scale), of its shape."""
    decoded, scale = factors(x, column=x.row_data is None)
    return times(decoded.astype(np.float32), scale).reshape(x.shape)


def values_of(x: torch.Tensor | Quantized, name: str) -> F64:
    """Float64 values, of the logical shape, of a float tensor or a `Quantized`."""
    if isinstance(x, Quantized):
        return matrix(x, prefer_column=False).reshape(x.shape)
    host.check_float(name, x)
    return host.double(x)
