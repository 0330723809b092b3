# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `quantize` that round stochastically, of values at chosen places between two codes.

Scaled values are made first: codes of every binade, and places next to either code, where draws of a few bits show, in
the middle, and anywhere. Elements with the encoding's largest value lie in each block, so that every scale is 1 (of
NVFP4, 1/448 for its block and 1 for the tensor).
"""

from __future__ import annotations

import math

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.decoding import table
from te_dispatch.conformance.families.quantize import DTYPE, USAGE, quantizer_of, sizes
from te_dispatch.conformance.families.quantize_fp4 import stochastic_rules, whole_blocks
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.space import Arguments, Axis, Drawn, Rounding, Space, Values, register
from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8TileQuantizer,
    Quantizer,
)

_FP4 = ("nvfp4", "nvfp4_2d", "nvfp4_rht")
_CAST = Axis("cast", ("delayed", "current", "block_1d", "block_2d", "mxfp8", "mxfp8_2d", *_FP4), ("block_1d", "nvfp4"))
_ENCODING = Axis("encoding", ("e4m3fn", "e5m2", "e2m1"), once=("e4m3fnuz", "e5m2fnuz"))
#: Multiples of `_APART` and of 16 rows; partial blocks of 32 and 128. Draws of eight bits show in many elements only.
_SHAPE = Axis("shape", ("2x40x144", "128x96"), once=("256x384",))
#: Rows plus columns of elements with the largest value leave the same rest.
_APART = 16
#: Next to the smaller code, to the larger one, in the middle; the rest of them anywhere.
_PLACES, _SHARES = (1 / 512, 511 / 512, 0.5), (0.35, 0.2, 0.15)
#: Nearer to a code than this is at it: products are rounded to fp32.
_NEAR = 1e-4


def _valid(values: Values) -> bool:
    return (values["encoding"] == "e2m1") == (values["cast"] in _FP4) and whole_blocks(values)


def _positive(quantizer: Quantizer) -> torch.Tensor:
    """float64: 0 and the positive finite values of an encoding, in order."""
    known = {value for value in table(quantizer.encoding).tolist() if 0.0 <= value <= quantizer.max_value}
    return torch.tensor(sorted(known), dtype=torch.float64)


def _cast(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of(values["cast"], values["encoding"], scale=1.0)
    known, shape, g = _positive(quantizer), sizes(values), maker.generator
    count = math.prod(shape)
    below = torch.randint(len(known) - 1, (count,), generator=g)
    place = torch.rand(count, generator=g, dtype=torch.float64)
    chosen = torch.rand(count, generator=g)
    start = 0.0
    for at, share in zip(_PLACES, _SHARES):
        place[(chosen >= start) & (chosen < start + share)] = at
        start += share
    scaled = known[below] + place * (known[below + 1] - known[below])
    scaled = torch.where(torch.rand(count, generator=g) < 0.5, -scaled, scaled)
    x = _operand(scaled.reshape(shape), quantizer).to(DTYPES[values["dtype"]])
    return {"x": x, "quantizer": quantizer, "usage": values["usage"], "rng_state": maker.rng_state()}


def _operand(scaled: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """What is cast, for these scaled values: some of them become the largest one, so that scales are 1."""
    matrix = scaled.reshape(-1, scaled.shape[-1])
    row, column = (torch.arange(size) for size in matrix.shape)
    matrix = torch.where((row[:, None] + column) % _APART == 0, _positive(quantizer)[-1], matrix)
    return (matrix * (448.0 if quantizer.encoding == "e2m1" else 1.0)).reshape(scaled.shape)


def _placed(arguments: Arguments, place: torch.Tensor) -> Arguments | None:
    """`Rounding.placed`: fp32 holds all places that are multiples of 2^-20."""
    x, quantizer = arguments["x"], arguments["quantizer"]
    if x.dtype != torch.float32:
        return None
    scaled = place.reshape(x.shape) * _positive(quantizer)[1]
    return {**arguments, "x": _operand(scaled, quantizer).to(x.dtype)}


def _recover(arguments: Arguments, result: Quantized) -> dict[str, Drawn]:
    """Of a rotated copy, nothing: its values are known within bounds only."""
    quantizer = arguments["quantizer"]
    x = arguments["x"].double().reshape(-1, arguments["x"].shape[-1])
    known = _positive(quantizer)
    found = {}
    for copy, data in (("row", result.row_data), ("column", result.col_data)):
        if data is None or (copy == "column" and quantizer.kind == "nvfp4_rht"):
            continue
        factor = casting.values(_ones(result), copy == "column")
        scaled, made = x / factor, casting.values(result, copy == "column") / factor
        at = (torch.searchsorted(known, scaled.abs(), right=True) - 1).clamp(0, len(known) - 2)
        below, above = known[at], known[at + 1]
        position = (scaled.abs() - below) / (above - below)
        found[copy] = Drawn(
            up=(made.abs() - above).abs() < (made.abs() - below).abs(),
            position=position,
            known=(position > _NEAR) & (position < 1 - _NEAR),
            negative=scaled < 0,
            subnormal=scaled.abs() < 2.0 ** (1 - encoding(quantizer.encoding).bias),
        )
    return found


def _ones(record: Quantized) -> Quantized:
    """A record with the same scales and codes that read 1."""
    code = int((table(record.encoding) == 1).nonzero()[0])
    code = code * 0x11 if record.encoding == "e2m1" else code
    row, column = (None if x is None else torch.full_like(x, code) for x in (record.row_data, record.col_data))
    return Quantized(
        row, column, record.row_scale_inv, record.col_scale_inv, record.encoding, record.scaling, record.scale_layout,
        record.shape, record.dtype, record.device, record.global_scale_inv,
    )  # fmt: skip


def _one_matrix(arguments: Arguments) -> bool:
    quantizer = arguments["quantizer"]
    if isinstance(quantizer, BlockQuantizer):
        return quantizer.two_d
    return isinstance(quantizer, (DelayedQuantizer, CurrentQuantizer, MXFP8TileQuantizer))


register(
    Space(
        "quantize", "drawn", (_CAST, _ENCODING, DTYPE, _SHAPE, USAGE), _cast, stochastic_rules, _valid, widen=False,
        serves=lambda arguments: arguments.get("rng_state") is not None and arguments["quantizer"].encoding != "e2m1",
        rounding=Rounding(_recover, _one_matrix, _placed),
    ),
)  # fmt: skip
