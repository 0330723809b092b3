# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `quantize` on every bit pattern of bf16 and fp16 and random ones of fp32, on ties of FP4, and with
stochastic rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance import encoding
from te_dispatch.conformance.casting import either_neighbour
from te_dispatch.conformance.decoding import table
from te_dispatch.conformance.families.quantize import (
    COMMON,
    DTYPE,
    ENCODING,
    USAGE,
    bits,
    encodable,
    operand,
    quantizer_of,
    record_amax,
    sizes,
)
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer

#: Random fp32 patterns of a case. A level-full run has a dozen such cases.
_PATTERNS = 2**20
#: Values that share a scale, along a row or a column.
_BLOCKS = {"mxfp8": 32, "block_1d": 128, "block_2d": 128, "nvfp4": 16}


def every_pattern(dtype: str, maker: Maker) -> torch.Tensor:
    """All 2^16 patterns of a 16-bit dtype as (256, 256), rows of like exponents; 2^20 random ones of fp32."""
    if dtype == "fp32":
        patterns = maker.integers(-(2**31), 2**31, _PATTERNS // 1024, 1024, dtype=torch.int64).to(torch.int32)
        # A block of whole-range numbers holds an Inf or NaN every 256; and rows of like exponents, as of the others.
        like = (patterns & 0x00FFFFFF) | (patterns[:, :1] & -0x01000000)
        patterns = torch.cat((patterns[: _PATTERNS // 2048], like[_PATTERNS // 2048 :]))
        return patterns.view(torch.float32)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype]).view(256, 256)


def _patterns(values: Values, maker: Maker) -> Arguments:
    common = values["common"] == "yes"
    quantizer = quantizer_of("delayed", values["encoding"], common, scale=float(values["scale"]))
    return {"x": every_pattern(values["dtype"], maker), "quantizer": quantizer, "usage": "row"}


def _blocks(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of(values["cast"], values["encoding"], values["common"] == "yes")
    return {"x": every_pattern(values["dtype"], maker), "quantizer": quantizer, "usage": values["usage"]}


def _fp4_ties(values: Values, maker: Maker) -> Arguments:
    """Midpoints between e2m1 values that the cast's scales leave midpoints.

    The amax handed in makes the tensor's scale 448 * 6 / 2688 = 1. Every block along rows and along columns holds
    6 * 2^e, which makes its scale 2^e exactly; the rest is a midpoint times 2^e.
    """
    m, k = sizes(values)
    block = 2.0 ** int(values["exponent"])
    found = table("e2m1")[:8]
    points = torch.cat((found, (found[1:] + found[:-1]) / 2))
    x = points[maker.integers(0, points.numel(), m, k, dtype=torch.int64)]
    x = torch.where((torch.arange(m)[:, None] + torch.arange(k)) % 16 == 0, 6.0, x)
    x = block * torch.where(maker.boolean(m, k), x, -x)
    quantizer = quantizer_of(values["cast"], "e2m1", values["common"] == "yes")
    amax = torch.full((1,), 2688.0)
    return {"x": x.to(DTYPES[values["dtype"]]), "quantizer": quantizer, "usage": values["usage"], "amax": amax}


def _limits(values: Values, maker: Maker) -> Arguments:
    """Blocks whose largest magnitude is where the scale turns to the next one, and the numbers beside it.

    A scale that is a power of two turns behind max_value * 2^k. NVFP4's are e4m3: with the amax handed in, which makes
    the tensor's scale 1, they turn at 6 times a midpoint of e4m3.
    """
    cast, dtype = values["cast"], DTYPES[values["dtype"]]
    quantizer = quantizer_of(cast, values["encoding"], values["common"] == "yes")
    arguments: Arguments = {"quantizer": quantizer, "usage": values["usage"]}
    if cast == "nvfp4":
        scales = table("e4m3fn")[:127]
        limits = 3.0 * (scales[1:] + scales[:-1])
        arguments["amax"] = torch.full((1,), 2688.0)
    else:
        info = torch.finfo(dtype)
        exponents = torch.arange(-100, 101, 8 if cast == "block_2d" else 1, dtype=torch.float64)
        limits = quantizer.max_value * exponents.exp2()
        limits = limits[(limits >= info.smallest_normal) & (limits < info.max / 2)]
    at = limits.to(dtype)
    below, above = (torch.nextafter(at, torch.full_like(at, end)) for end in (0.0, torch.inf))
    largest = torch.stack((below, at, above), 1)
    block = _BLOCKS[cast]
    rows = block if cast == "block_2d" else 1
    # Blocks of a row, or columns of them, beside one another in threes.
    shape = (largest.shape[0], rows, largest.shape[1], block)
    x = (largest[:, None, :, None].double() * (maker.tensor(*shape).double() / 16).clamp(-1, 1)).to(dtype)
    x[:, 0, :, 7] = largest
    x = x.reshape(-1, largest.shape[1] * block)
    return {**arguments, "x": x if values["usage"] == "row" else x.t().contiguous()}


def _stochastic(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of("delayed", values["encoding"], values["common"] == "yes", scale=float(values["scale"]))
    x = operand(values, maker)
    if x.numel():  # in each encoding, with and without `common`: both zeros, and what saturates
        x.view(-1)[:4] = torch.tensor([-0.0, 0.0, 6e4, -6e4])
    return {"x": x, "quantizer": quantizer, "usage": "row", "rng_state": maker.rng_state()}


def _scaled(x: torch.Tensor, quantizer: DelayedQuantizer) -> torch.Tensor:
    return x.float() * quantizer.scale


def _without_draw(arguments: Arguments, values: Values) -> Quantized:
    """What no draw changes, and codes that `_either_neighbour` does not look at."""
    x, quantizer = arguments["x"], arguments["quantizer"]
    keeps = quantizer.keeps_negative_zero
    inner, _ = encoding.neighbours(_scaled(x, quantizer), quantizer.encoding, quantizer.max_value, keeps)
    record_amax(x, quantizer)
    return Quantized(
        inner, None, quantizer.scale.reciprocal(), None, quantizer.encoding, quantizer.scaling, CANONICAL_SCALES,
        tuple(x.shape), x.dtype, x.device,
    )  # fmt: skip


def _either_neighbour(judged: Judged) -> Mapping[str, Rule]:
    """`rng_state` asks for one of the two codes that a value lies between; scales and amax do not depend on it."""
    x, quantizer = judged.arguments["x"], judged.arguments["quantizer"]
    scaled = _scaled(x, quantizer)
    return {**bits(judged), "row_data": either_neighbour(scaled, scaled, quantizer)}


_CAST = Axis("cast", ("block_1d", "block_2d", "mxfp8", "nvfp4"))

register(
    Space(
        "quantize", "patterns",
        (Axis("dtype", ("bf16", "fp16", "fp32")), ENCODING, COMMON, Axis("scale", ("1.0", "0.37", "65504.0"))),
        _patterns, bits, widen=False,
    ),
    Space(
        "quantize", "block_patterns",
        (Axis("dtype", ("bf16", "fp16", "fp32")), _CAST, ENCODING, COMMON, Axis("usage", ("row", "column"))),
        _blocks, bits, valid=encodable, widen=False, like="block",
    ),
    Space(
        "quantize", "fp4_ties",
        (
            DTYPE, Axis("cast", ("nvfp4", "nvfp4_2d")), Axis("shape", ("64x80", "17x33")),
            Axis("exponent", ("0", "-5", "7")), USAGE, COMMON,
        ),
        _fp4_ties, bits, widen=False, like="nvfp4",
    ),
    Space(
        "quantize", "block_limits",
        (
            Axis("cast", ("mxfp8", "block_1d", "block_2d", "nvfp4")), ENCODING, DTYPE,
            Axis("usage", ("row", "column")), COMMON,
        ),
        _limits, bits, valid=encodable, widen=False, checks=("values",),
    ),
    Space(
        "quantize", "stochastic",
        (
            ENCODING, DTYPE, Axis("shape", ("33x65", "16x0")), Axis("values", ("normal", "saturation", "nan")), COMMON,
            Axis("scale", ("0.37",)),
        ),
        _stochastic, _either_neighbour, widen=False, oracle=_without_draw,
        serves=lambda arguments: arguments.get("rng_state") is not None and arguments["quantizer"].kind == "delayed",
    ),
)  # fmt: skip
