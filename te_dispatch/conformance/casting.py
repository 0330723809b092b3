# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of values that are only known within a bound, and what records stand for: the kit's own arithmetic.

A fused operator casts a number that it computed in fp32, so its codes cannot be asked for by bits. But everything from
the number to the code is monotonic: amax, scale, product and encoding of the interval's ends enclose what a right
implementation may write. Scales are judged first, against the interval of the amax; codes then against the scale that
the implementation itself reports, which is how they will be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.known import Known
from te_dispatch.conformance.decoding import decode, nibbles
from te_dispatch.conformance.encoding import nearest, neighbours
from te_dispatch.conformance.rules import Bitwise, Codes, Rule, Within
from te_dispatch.numerics import hadamard
from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS, Quantized, row_count
from te_dispatch.numerics.quantizers import (
    BLOCK,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.ops.shapes import ceil_div, rows_of, scale_shapes

_LARGEST = torch.finfo(torch.float32).max


def _spread(per_block: torch.Tensor, rows: int, columns: int, shape: tuple[int, int]) -> torch.Tensor:
    wide = per_block.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def _canonical(scale: torch.Tensor, x: Quantized, column: bool) -> torch.Tensor:
    """Scales of a copy in canonical order (`te_dispatch.ops.relayout_scales` defines the others)."""
    if x.scale_layout == CANONICAL_SCALES:
        return scale
    rows, columns = scale_shapes(x.shape, x.scaling)[1 if column else 0]
    if x.scale_layout in ("gemm_1d", "gemm_2d"):
        return _taken_back(scale, x.scale_layout, rows, columns)
    if x.scale_layout != "swizzled_32x4x4":
        raise ValueError(f"scale_layout: got {x.scale_layout!r}, expected canonical, gemm_1d, gemm_2d, swizzled_32x4x4")
    turned = x.scaling == "mxfp8" and column
    lines, blocks = (columns, rows) if turned else (rows, columns)
    tiles = scale.reshape(ceil_div(lines, 128), ceil_div(blocks, 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    found = tiles.reshape(ceil_div(lines, 128) * 128, ceil_div(blocks, 4) * 4)[:lines, :blocks]
    return found.t() if turned else found


def _taken_back(scale: torch.Tensor, layout: str, lines: int, blocks: int) -> torch.Tensor:
    """(lines, blocks): float scales of a layout in canonical order, without their padding."""
    return (scale.t() if layout == "gemm_1d" else scale)[:lines, :blocks]


def _laid_out(per_block: torch.Tensor, layout: str) -> torch.Tensor:
    """The way back, padded with zeros."""
    if layout == CANONICAL_SCALES:
        return per_block
    lines = per_block.t() if layout == "gemm_1d" else per_block
    return torch.cat((lines, lines.new_zeros(lines.shape[0], -lines.shape[1] % 4)), 1)


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes == 0xFF, torch.nan, torch.exp2(codes.double() - 127))


def values(x: Union[torch.Tensor, Quantized], column: bool = False, lifted: bool = False) -> torch.Tensor:
    """float64 (M, K): what an operand stands for, exactly; of a record, the copy asked for where it has both.

    Args:
        lifted: of a record, take the encoding's smallest normal number for every subnormal one but 0.
    """
    if isinstance(x, torch.Tensor):
        return x.double().reshape(row_count(x), x.shape[-1])
    column = x.row_data is None or (column and x.col_data is not None)
    m, k = row_count(x), x.shape[-1]
    data, scale = (x.col_data, x.col_scale_inv) if column else (x.row_data, x.row_scale_inv)
    assert data is not None and scale is not None
    turned = column and x.scaling != "mxfp8"
    shape = (k, m) if turned else (m, k)
    scale = _canonical(scale, x, column)
    if x.scaling == "tensor":
        factor = scale.double().reshape(1, 1)
    elif x.scaling == "mxfp8":
        factor = _spread(_e8m0(scale), *((32, 1) if column else (1, 32)), shape)
    elif x.scaling in NVFP4_SCALINGS:
        assert x.global_scale_inv is not None
        # The contract rounds this product to fp32.
        factor = (decode(scale, "e4m3fn").float() * x.global_scale_inv[-1 if column else 0]).double()
        factor = _spread(factor, 1, 16, shape)
        data = nibbles(data.reshape(shape[0], ceil_div(shape[1], 2)))[:, : shape[1]]
    else:
        factor = _spread(scale.double(), 128 if x.scaling == "block_2d" else 1, 128, shape)
    found = decode(data.reshape(shape), x.encoding)
    if lifted:
        normal = found.abs().clamp_min(2.0 ** (1 - encoding(x.encoding).bias))
        found = torch.where(found != 0, torch.copysign(normal, found), found)
    found = found * factor
    return found.t() if turned else found


class _Interval(NamedTuple):
    """Both ends, float64."""

    low: torch.Tensor
    high: torch.Tensor


def _ends(known: Known) -> _Interval:
    """Of the fp32 number that is cast. An Inf or NaN has no error."""
    error = torch.where(known.value.isfinite(), known.error + U32 * known.value.abs(), 0.0)
    return _Interval(known.value - error, known.value + error)


def _magnitude(ends: _Interval) -> _Interval:
    """Of |x|; NaN counts as 0, as amax has it."""
    high = torch.maximum(ends.low.abs(), ends.high.abs())
    low = torch.where((ends.low <= 0) & (ends.high >= 0), 0.0, torch.minimum(ends.low.abs(), ends.high.abs()))
    return _Interval(low.nan_to_num(0.0, posinf=torch.inf), high.nan_to_num(0.0, posinf=torch.inf))


def _block_max(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    m, k = x.shape
    if not x.numel():
        return x.new_zeros((ceil_div(m, rows), ceil_div(k, columns)))
    padded = torch.nn.functional.pad(x, (0, -k % columns, 0, -m % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return tiles.amax((1, 3))


def _scale_of(amax: torch.Tensor, quantizer: Union[CurrentQuantizer, BlockQuantizer], max_value: float) -> torch.Tensor:
    """float32: RN32(max / max(amax, epsilon)), never Inf; 1 for an amax of 0 or Inf; mantissa cleared on request."""
    amax = amax.float().clamp_min(quantizer.epsilon)
    scale = (torch.full_like(amax, max_value) / amax).clamp_max(_LARGEST)
    if quantizer.power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def _around(scale_inv: torch.Tensor) -> _Interval:
    """The scales whose reciprocal rounds to `scale_inv`: it is nearer to that than its neighbours are."""
    inverse = scale_inv.float()
    up = torch.nextafter(inverse, torch.full_like(inverse, torch.inf)).double()
    down = torch.nextafter(inverse, torch.zeros_like(inverse)).double()
    return _Interval((1 / up).nan_to_num(0.0), (1 / down).clamp_max(_LARGEST))


def _power_of_two(scales: _Interval) -> _Interval:
    """The one power of two among them."""
    exact = torch.exp2((scales.low * scales.high).sqrt().log2().round())
    return _Interval(exact, exact)


def _products(ends: _Interval, scales: _Interval) -> _Interval:
    """RN32 of every product of a value and a scale (scales are not negative)."""
    low = torch.minimum(ends.low * scales.low, ends.low * scales.high)
    high = torch.maximum(ends.high * scales.low, ends.high * scales.high)
    return _Interval(low.float().double(), high.float().double())


def _codes(ends: _Interval, quantizer: Quantizer, stochastic: bool = False) -> Codes:
    name, top, keeps = quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero
    if stochastic:
        return either_neighbour(ends.low, ends.high, quantizer)
    return Codes(name, nearest(ends.low, name, top, keeps), nearest(ends.high, name, top, keeps))


def either_neighbour(low: torch.Tensor, high: torch.Tensor, quantizer: Quantizer) -> Codes:
    """Of numbers between `low` and `high` that are rounded stochastically."""
    name, top = quantizer.encoding, quantizer.max_value
    found = []
    for end, side in ((low, -1), (high, 1)):
        inner, outer = neighbours(end, name, top, quantizer.keeps_negative_zero)
        lower = decode(outer, name) < decode(inner, name)
        found.append(torch.where(lower if side < 0 else ~lower, outer, inner))
    return Codes(name, *found)


def _between(low: torch.Tensor, high: torch.Tensor, expected: torch.Tensor) -> Within:
    """Within an interval that need not have `expected` in its middle."""
    want = expected.double().reshape(low.shape)
    limit = torch.maximum((want - low.double()).abs(), (high.double() - want).abs())
    return Within(limit.reshape(expected.shape))


def _scale_inv_rule(
    amax: _Interval, quantizer: Union[CurrentQuantizer, BlockQuantizer], expected: torch.Tensor
) -> Within:
    """A larger amax gives a smaller scale and a larger inverse. Where the amax may be 0 or not, the scale may be 1."""
    ends = [1.0 / _scale_of(end, quantizer, quantizer.max_value) for end in amax]
    rule = _between(ends[0], ends[1], expected)
    either = (
        (amax.low == 0) & (amax.high > 0) if quantizer.epsilon == 0.0 else torch.zeros_like(amax.low, dtype=torch.bool)
    )
    return Within(torch.where(either.reshape(expected.shape), torch.inf, rule.limit))


def cast_rules(
    path: str,
    quantizer: Quantizer,
    known: Known,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    argument: str = "quantizer",
    given: torch.dtype | None = None,
    stochastic: bool = False,
) -> dict[str, Rule]:
    """Rules of all parts of a record, and of the amax that a delayed quantizer accumulates.

    Args:
        path: of the record among the results, e.g. ``y_quantized``.
        quantizer: as it was before the call.
        known: what is cast, of the record's logical shape.
        actual, expected: all results by path.
        argument: name of the parameter that holds the quantizer.
        given: dtype of what is cast, where it is an argument and not computed in fp32.
        stochastic: rounding to either of the two codes that a value lies between is right.
    """
    matrix = known.reshape(rows_of(tuple(known.value.shape)), known.value.shape[-1])
    rules: dict[str, Rule] = {}
    rotates = isinstance(quantizer, NVFP4HadamardQuantizer)
    whole = f"{path}.global_scale_inv"
    limits = []
    for copy, turned in (("row", False), ("col", True)):
        data, scale = f"{path}.{copy}_data", f"{path}.{copy}_scale_inv"
        if data not in actual:
            if rotates:
                limits.append(torch.zeros(1, dtype=torch.float64))
            continue
        copy_of = matrix.t() if turned else matrix
        ends = _ends(copy_of) if given is None else _Interval(copy_of.value, copy_of.value)
        parts = {name: (actual[name], expected[name]) for name in (data, scale)}
        global_inv = actual.get(whole)
        if rotates:
            ends = _rotated(copy_of, given is torch.bfloat16) if turned else ends
            assert global_inv is not None
            place = slice(1, 2) if turned else slice(0, 1)
            global_inv = global_inv[place]
            limits.append(_scale_inv_rule(_amax(ends), _GLOBAL, expected[whole][place]).limit)
        codes, scales = _copy_rules(ends, quantizer, parts[scale], global_inv, turned, stochastic)
        shape = actual[data].shape
        if quantizer.scaling == "mxfp8" and turned:
            codes = Codes(codes.encoding, codes.low.t(), codes.high.t())
        if quantizer.scaling not in NVFP4_SCALINGS:
            codes = Codes(codes.encoding, codes.low.reshape(shape), codes.high.reshape(shape))
        else:
            codes = _packed(codes, (*shape[:-1], codes.low.shape[-1]))
        rules |= {data: codes, scale: scales}
    if rotates:
        rules[whole] = Within(torch.cat(limits))
    elif whole in actual:
        to = _NARROW if getattr(quantizer, "scale_max", 448) == 256 else _GLOBAL
        rules[whole] = _scale_inv_rule(_amax(_ends(matrix)), to, expected[whole])
    rules |= _amax_rule(quantizer, matrix, expected, argument)
    return rules


def _amax(ends: _Interval) -> _Interval:
    return _Interval(*(end.amax().reshape(1) if end.numel() else torch.zeros(1) for end in _magnitude(ends)))


def _rotated(known: Known, to_bf16: bool) -> _Interval:
    """Of every 16 elements of a row times the random Hadamard matrix.

    The sum of 16 exact products errs by at most 15 u of the sum of their magnitudes, in any order; a product may lose
    what is below the smallest number of fp32. The ends are rounded as the sum is, which is monotonic.
    """
    blocks = (-1, hadamard.SIZE)
    matrix = torch.tensor(hadamard.matrix(), dtype=torch.float64)
    sums = (known.value.reshape(blocks) @ matrix).reshape(known.value.shape)
    reach = ((known.value.abs() + known.error).reshape(blocks) @ matrix.abs()).reshape(sums.shape)
    error = (known.error.reshape(blocks) @ matrix.abs()).reshape(sums.shape)
    error = torch.where(sums.isfinite(), error + 15 * U32 * reach + hadamard.SIZE * 2.0**-150, 0.0)
    ends = ((sums + error * side).float() for side in (-1, 1))
    return _Interval(*((end.bfloat16() if to_bf16 else end).double() for end in ends))


class _Global(CurrentQuantizer):
    """NVFP4's scale of the whole tensor: as current scaling to 448 x 6, or 256 x 6."""


_GLOBAL, _NARROW = _Global(), _Global()
object.__setattr__(_GLOBAL, "max_value", 448.0 * 6.0)
object.__setattr__(_NARROW, "max_value", 256.0 * 6.0)


def _packed(codes: Codes, shape: tuple[int, ...]) -> Codes:
    """One more code, 0, where a row's last byte is half used."""
    pad = (0, shape[-1] % 2)
    whole = (*shape[:-1], shape[-1] + pad[1])
    low, high = (torch.nn.functional.pad(end, pad).reshape(whole) for end in (codes.low, codes.high))
    return Codes(codes.encoding, low, high)


def _amax_rule(
    quantizer: Quantizer, matrix: Known, expected: Mapping[str, torch.Tensor], argument: str
) -> dict[str, Rule]:
    path = f"argument:{argument}.amax"
    if path not in expected:
        return {}
    assert isinstance(quantizer, DelayedQuantizer) and quantizer.amax is not None
    before = quantizer.amax.double().reshape(1)
    low, high = (torch.maximum(before, end.amax() if end.numel() else before) for end in _magnitude(_ends(matrix)))
    want = expected[path]
    if not bool(want.isfinite().all()):
        return {path: Bitwise()}
    rule = _between(low, high, want)
    return {path: Within(rule.limit + 2 * U32 * want.double())}


def _copy_rules(
    ends: _Interval,
    quantizer: Quantizer,
    scales: tuple[torch.Tensor, torch.Tensor],
    global_inv: Union[torch.Tensor, None],
    turned: bool,
    stochastic: bool,
) -> tuple[Codes, Rule]:
    """Of a matrix whose blocks lie along its last dimension."""
    reported, expected = scales
    shape = (ends.low.shape[0], ends.low.shape[1])
    if isinstance(quantizer, DelayedQuantizer):
        scale = quantizer.scale.double().reshape(1, 1)
        return _codes(_products(ends, _Interval(scale, scale)), quantizer, stochastic), Bitwise()
    size = _magnitude(ends)
    if isinstance(quantizer, CurrentQuantizer):
        amax = _Interval(*(end.amax().reshape(1) if end.numel() else torch.zeros(1) for end in size))
        around = _around(reported.reshape(1, 1))
        around = _power_of_two(around) if quantizer.power_of_two else around
        return _codes(_products(ends, around), quantizer, stochastic), _scale_inv_rule(amax, quantizer, expected)
    block = BLOCK[quantizer.scaling]
    if isinstance(quantizer, BlockQuantizer):
        rows = 128 if quantizer.two_d else 1
        amax = _Interval(*(_block_max(end, rows, block) for end in size))
        layout = quantizer.scale_layout
        reported, expected = (_taken_back(x, layout, *amax.low.shape) for x in scales)
        around = _around(reported)
        around = _power_of_two(around) if quantizer.power_of_two else around
        wide = _Interval(*(_spread(end, rows, block, shape) for end in around))
        # Padding is 0, without an error.
        rule = Within(_laid_out(_scale_inv_rule(amax, quantizer, expected).limit, layout))
        return _codes(_products(ends, wide), quantizer, stochastic), rule
    if isinstance(quantizer, (NVFP4Quantizer, NVFP4HadamardQuantizer, NVFP4FourOverSixQuantizer)):
        assert global_inv is not None
        return _nvfp4_rules(ends, quantizer, reported, global_inv, stochastic)
    if turned:  # stored untransposed
        reported, expected = reported.t(), expected.t()
    rows = 32 if isinstance(quantizer, MXFP8TileQuantizer) else 1
    codes = [_e8m0_code(_block_max(end, rows, block).float(), quantizer.max_value) for end in size]
    codes = [code.repeat_interleave(rows, 0)[: shape[0]] for code in codes]
    scale = _spread(1 / _e8m0(reported), 1, block, shape)
    rule = _between(codes[0], codes[1], expected)
    limit = rule.limit.t() if turned else rule.limit
    return _codes(_products(ends, _Interval(scale, scale)), quantizer, stochastic), Within(limit)


def _e8m0_code(amax: torch.Tensor, max_value: float) -> torch.Tensor:
    """ceil(log2(RN32(amax / max))) + 127 within [0, 0xFE]; 0 for an amax of 0, 0xFE for Inf."""
    fraction, exponent = torch.frexp((amax / torch.full_like(amax, max_value)).double())
    code = (exponent - (fraction == 0.5).int() + 127).clamp(0, 0xFE)
    return torch.where(amax == 0, 0, torch.where(amax.isinf(), 0xFE, code))


def _nvfp4_rules(
    ends: _Interval,
    quantizer: Union[NVFP4Quantizer, NVFP4HadamardQuantizer, NVFP4FourOverSixQuantizer],
    reported: torch.Tensor,
    global_inv: torch.Tensor,
    stochastic: bool,
) -> tuple[Codes, Codes]:
    """b = e4m3fn(RN32(RN32(amax S) / 6)), q = e2m1(RN32(RN32(x S) / b)), each between what its ends give.

    Of a quantizer that chooses, b may be that of either candidate: errors are close where values are only known to be
    between their ends. The choice is judged where values are given, by bits (`te_dispatch.conformance.families`).
    """
    scale = _around(global_inv.reshape(1, 1))
    rows = 16 if not isinstance(quantizer, NVFP4HadamardQuantizer) and quantizer.two_d else 1
    shape = (ends.low.shape[0], ends.low.shape[1])
    size = _magnitude(ends)
    amax = _products(_Interval(*(_block_max(end, rows, 16) for end in size)), scale)
    blocks = [(end / 6).float() for end in amax]
    low, high = _block_codes(blocks, rows, shape[0])
    if isinstance(quantizer, NVFP4FourOverSixQuantizer):
        low4, high4 = _block_codes([block * 1.5 for block in blocks], rows, shape[0])
        four = reported > high
        low, high = torch.where(four, low4, low), torch.where(four, high4, high)
    divisor = _spread(decode(reported, "e4m3fn"), 1, 16, shape)
    scaled = _products(ends, scale)
    quotient = (torch.where(divisor == 0, 0.0, end / divisor).float() for end in scaled)
    return _codes(_Interval(*quotient), quantizer, stochastic), Codes("e4m3fn", low, high)


def _block_codes(scales: Sequence[torch.Tensor], rows: int, lines: int) -> list[torch.Tensor]:
    """e4m3fn codes of tiles `rows` high, of each of their lines."""
    return [nearest(scale, "e4m3fn", 448.0, True).repeat_interleave(rows, 0)[:lines] for scale in scales]


def through(known: Known, quantizer: Quantizer) -> Known:
    """What a per-tensor cast of numbers leaves of them: between what it leaves of the ends of their intervals.

    Raises:
        ValueError: a quantizer with scales of its own per block.
    """
    if quantizer.scaling != "tensor":
        raise ValueError(f"quantizer: got {quantizer.scaling} scaling, expected tensor")
    if not known.value.numel():
        return known
    ends = _ends(known)
    exact = _Interval(known.value, known.value)
    if isinstance(quantizer, DelayedQuantizer):
        scale = quantizer.scale.double().reshape(())
        scales = nominal = _Interval(scale, scale)
    else:
        assert isinstance(quantizer, CurrentQuantizer)
        top = quantizer.max_value
        high, low = (_scale_of(end.amax(), quantizer, top).double() for end in _magnitude(ends))
        scales, middle = _Interval(low, high), _scale_of(known.value.abs().amax(), quantizer, top).double()
        nominal = _Interval(middle, middle)
    value = _left(exact, nominal, quantizer)[0]
    below, above = _left(ends, scales, quantizer)
    # The record's scale_inv is rounded once, and so is its product with a code.
    error = torch.maximum(value - below, above - value) + 2 * U32 * value.abs()
    return Known(value, torch.where(known.largest > 0, error, 0.0))


def _left(ends: _Interval, scales: _Interval, quantizer: Quantizer) -> _Interval:
    """Decoded codes divided by any of the scales."""
    codes = _codes(_products(ends, scales), quantizer)
    low, high = (decode(code, quantizer.encoding) for code in (codes.low, codes.high))
    low = torch.minimum(low / scales.low, low / scales.high)
    return _Interval(low, torch.maximum(high / scales.low, high / scales.high))
