# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls on more elements than 31 bits count (level soak), judged at sampled places by the kit's own arithmetic.

What they find is an index that overflows: so the sample is dense around 2^31 and at the end, and the largest magnitude
of all is the very last element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance import encoding
from te_dispatch.conformance.decoding import decode
from te_dispatch.conformance.families.quantize import quantizer_of, record_amax, sizes
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Bitwise, Rule, Sampled
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer

#: Random places that are judged, beside the edges.
_SAMPLES = 20_000
#: Places on either side of an edge.
_EDGE = 256
#: Repeated to fill a tensor, since drawing 2^31 numbers takes minutes: a prime, that no row length divides.
_PERIOD = 1_048_573
#: A magnitude beyond any drawn one.
_LARGEST = 1000.0
_BLOCK = {"block_1d": 128, "mxfp8": 32}


def places(count: int) -> torch.Tensor:
    """The sampled indices into `count` elements, ascending; the same every time; all where there are few."""
    if count <= _SAMPLES:
        return torch.arange(count)
    drawn = torch.randint(0, count, (_SAMPLES,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    edges = [torch.arange(edge - _EDGE, edge + _EDGE) for edge in (_EDGE, 2**31, 2**32, count - _EDGE)]
    found: torch.Tensor = torch.cat((drawn, *edges)).unique()  # type: ignore[no-untyped-call]
    return found[(found >= 0) & (found < count)]


def at_samples(judged: Judged) -> Mapping[str, Rule]:
    """Every result by the bits of its sampled elements; arguments that are written, whole."""
    return {
        path: Bitwise() if path.startswith("argument:") else Sampled(places(tensor.numel()), Bitwise())
        for path, tensor in judged.actual.items()
    }


def repeated(period: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape, dtype=period.dtype)
    flat = out.view(-1)
    for start in range(0, flat.numel(), period.numel()):
        piece = flat[start : start + period.numel()]
        piece.copy_(period[: piece.numel()])
    return out


def _floats(values: Values, maker: Maker) -> torch.Tensor:
    x = repeated(maker.tensor(_PERIOD, dtype=values["dtype"]), sizes(values))
    x.view(-1)[-1] = -_LARGEST
    return x


def _record(values: Values, maker: Maker) -> Quantized:
    data = repeated(maker.integers(0, 256, _PERIOD, dtype=torch.uint8), sizes(values))
    scale = torch.full((1,), 0.37)
    return Quantized(
        data, None, scale, None, "e4m3fn", "tensor", CANONICAL_SCALES, tuple(data.shape), torch.bfloat16, data.device
    )


def _quantize(values: Values, maker: Maker) -> Arguments:
    x = _floats(values, maker)
    return {"x": x, "quantizer": quantizer_of(values["cast"], "e4m3fn"), "usage": values["usage"]}


def _samples_of_cast(arguments: Arguments, values: Values) -> Quantized:
    """A record with the sampled elements of each tensor in place of the tensor."""
    x, quantizer = arguments["x"], arguments["quantizer"]
    (m, k), flat, at = x.shape, x.view(-1), places(x.numel())
    record = Quantized(
        None, None, None, None, quantizer.encoding, quantizer.scaling, CANONICAL_SCALES, (m, k), x.dtype, x.device
    )
    if quantizer.scaling == "tensor":
        scale = _tensor_scale(x, quantizer)
        if values["usage"] != "column":
            record.row_data, record.row_scale_inv = _codes(flat[at].float() * scale, quantizer), scale.reciprocal()
        if values["usage"] != "row":
            column = x[at % m, at // m]  # of the transposed copy
            record.col_data, record.col_scale_inv = _codes(column.float() * scale, quantizer), scale.reciprocal()
        return record
    block = _BLOCK[values["cast"]]
    scale, _ = _block_scales(x, at // k, at % k // block, block, quantizer)
    record.row_data = _codes(flat[at].float() * scale, quantizer)
    per_row = -(-k // block)
    of_scales = places(m * per_row)
    _, record.row_scale_inv = _block_scales(x, of_scales // per_row, of_scales % per_row, block, quantizer)
    return record


def _tensor_scale(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    if isinstance(quantizer, DelayedQuantizer):
        record_amax(x, quantizer)
        return quantizer.scale
    low, high = torch.aminmax(x)
    return torch.full((1,), quantizer.max_value) / torch.maximum(-low, high).float()


def _block_scales(
    x: torch.Tensor, row: torch.Tensor, index: torch.Tensor, block: int, quantizer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of some blocks along rows, and what the record holds of them. Of finite, nonzero, ordinary values."""
    column = index[:, None] * block + torch.arange(block)
    held = x[row[:, None], column.clamp_max(x.shape[1] - 1)].float().abs()
    amax = torch.where(column < x.shape[1], held, 0.0).amax(1)
    largest = torch.full_like(amax, quantizer.max_value)
    if quantizer.kind == "block":
        scale = torch.ldexp(torch.full_like(amax, 0.5), torch.frexp(largest / amax).exponent)  # the mantissa cleared
        return scale, scale.reciprocal()
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(amax), -exponent), (exponent + 127).to(torch.uint8)


def _codes(scaled: torch.Tensor, quantizer: Any) -> torch.Tensor:
    return encoding.nearest(scaled, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero)


def _samples_of_values(arguments: Arguments, values: Values) -> torch.Tensor:
    x = arguments["x"]
    codes = x.row_data.view(-1)[places(x.row_data.numel())]
    values_there: torch.Tensor = decode(codes, x.encoding).float() * x.row_scale_inv
    return values_there.to(x.dtype)


def _samples_of_transpose(arguments: Arguments, values: Values) -> Quantized:
    x = arguments["x"]
    m, at = x.shape[0], places(x.row_data.numel())
    return Quantized(
        x.row_data.view(-1)[at], x.row_data[at % m, at // m], x.row_scale_inv, x.row_scale_inv, x.encoding, x.scaling,
        x.scale_layout, x.shape, x.dtype, x.device,
    )  # fmt: skip


#: 2^31 + 560,745 elements; neither size divides by 16.
_SHAPE = Axis("shape", ("46343x46351",))

register(
    Space(
        "quantize", "huge",
        (
            Axis("cast", ("delayed", "current", "block_1d", "mxfp8")), Axis("usage", ("row", "both")),
            Axis("dtype", ("bf16",)), _SHAPE,
        ),
        _quantize, at_samples, valid=lambda values: values["usage"] == "row" or values["cast"] not in _BLOCK,
        widen=False, oracle=_samples_of_cast, sampled=True,
    ),
    Space(
        "compute_amax", "huge", (Axis("dtype", ("bf16",)), _SHAPE),
        lambda values, maker: {"x": _floats(values, maker)}, at_samples,
        widen=False, oracle=lambda arguments, values: torch.full((1,), _LARGEST), sampled=True,
    ),
    Space(
        "dequantize", "huge", (_SHAPE,), lambda values, maker: {"x": _record(values, maker)}, at_samples,
        widen=False, oracle=_samples_of_values, sampled=True,
    ),
    Space(
        "transpose_quantized", "huge", (_SHAPE,), lambda values, maker: {"x": _record(values, maker)}, at_samples,
        widen=False, oracle=_samples_of_transpose, sampled=True,
    ),
)  # fmt: skip
