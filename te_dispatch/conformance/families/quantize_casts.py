# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `quantize`, a space per kind of quantizer, because each has options of its own."""

from __future__ import annotations

import torch

from te_dispatch.conformance.families.quantize import (
    COMMON,
    DTYPE,
    ENCODING,
    LATE,
    SHAPE,
    USAGE,
    VALUES,
    bits,
    operand,
    quantizer_of,
)
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer

#: Flags other than 1 and 0, and their values: all but -0 are set.
_FLAGS = {"flag_half": 0.5, "flag_minus": -1.0, "flag_tiny": 1e-38, "flag_nan": torch.nan, "flag_minus_zero": -0.0}
#: Where the result goes: fresh memory; a record with just the copies asked for; one with both copies, each with scales
#: in memory of their own, of which a row- or column-wise cast leaves one alone; and that one under a flag that is 0, or
#: not 0.
_OUT = Axis("out", ("fresh", "exact", "both", "flag_clear", "flag_set"), once=tuple(_FLAGS))
#: The amax that is handed in: the tensor's own, one that is too small for it, and those without a scale.
_AMAX = Axis("amax", ("none", "own", "small", "tiny", "zero", "inf", "nan"))
_GIVEN = {"small": 0.5, "tiny": 1e-42, "zero": 0.0, "inf": torch.inf, "nan": torch.nan}


def _call(values: Values, maker: Maker, quantizer: Quantizer, spare: Quantizer) -> Arguments:
    """Arguments with the axes that all kinds share; `spare` makes what lies in `out` before the call."""
    x = operand(values, maker)
    arguments: Arguments = {"x": x, "quantizer": quantizer, "usage": values["usage"]}
    if values["out"] != "fresh":
        before = maker.tensor(*x.shape, dtype=values["dtype"])
        usage = values["usage"] if values["out"] == "exact" else "both"
        out = arguments["out"] = maker.quantized(before, spare, usage)
        if values["out"] != "exact" and out.col_scale_inv is out.row_scale_inv is not None:
            out.col_scale_inv = out.row_scale_inv.clone()
        _fill(out, maker)
    if values["out"].startswith("flag"):
        flag = {"flag_set": 1.0, "flag_clear": 0.0, **_FLAGS}[values["out"]]
        arguments["noop_flag"] = torch.full((1,), flag)
    given = values.get("amax")
    if given == "own":
        arguments["amax"] = maker.reference("compute_amax").call({"x": x})
    elif given in _GIVEN:
        arguments["amax"] = torch.full((1,), _GIVEN[given])
    return arguments


def _fill(record: Quantized, maker: Maker) -> None:
    """Draw what a record holds, padding of scales too."""
    parts = (record.row_data, record.col_data, record.row_scale_inv, record.col_scale_inv, record.global_scale_inv)
    for part in parts:
        if part is not None and part.dtype == torch.uint8:
            part.copy_(maker.integers(0, 256, *part.shape, dtype=torch.uint8))
        elif part is not None:
            part.copy_(maker.tensor(*part.shape, dtype="fp32"))


def _delayed(values: Values, maker: Maker) -> Arguments:
    start = {"zero": 0.0, "large": 1e4, "none": None}[values["recorded"]]
    cast = (values["encoding"], values["common"] == "yes")
    quantizer = quantizer_of("delayed", *cast, scale=float(values["scale"]), amax=start)
    return _call(values, maker, quantizer, quantizer_of("delayed", *cast, scale=3.0))


def _current(values: Values, maker: Maker) -> Arguments:
    return _computed("current", values, maker)


def _block(values: Values, maker: Maker) -> Arguments:
    return _computed(values["cast"], values, maker)


def _computed(cast: str, values: Values, maker: Maker) -> Arguments:
    """Of a kind that computes fp32 scales, and has their options."""
    encoding, common = values["encoding"], values["common"] == "yes"
    power_of_two, epsilon = values["power_of_two"] == "yes", float(values["epsilon"])
    quantizer = quantizer_of(cast, encoding, common, power_of_two=power_of_two, epsilon=epsilon)
    return _call(values, maker, quantizer, quantizer_of(cast, encoding, common))


def _mxfp8(values: Values, maker: Maker) -> Arguments:
    cast = ("mxfp8", values["encoding"], values["common"] == "yes")
    return _call(values, maker, quantizer_of(*cast), quantizer_of(*cast))


def _nvfp4(values: Values, maker: Maker) -> Arguments:
    cast = (values["cast"], "e2m1", values["common"] == "yes")
    return _call(values, maker, quantizer_of(*cast), quantizer_of(*cast))


def _rows(values: Values, maker: Maker) -> Arguments:
    return {"x": operand(values, maker), "quantizer": quantizer_of(values["cast"], values["encoding"]), "usage": "row"}


def _half(arguments: Arguments) -> Arguments:
    return {**arguments, "x": arguments["x"][: arguments["x"].shape[0] // 2]}


_EPSILON = Axis("epsilon", ("0.0", "0.001", "10.0"))
_POWER = Axis("power_of_two", ("no", "yes"))
_SCALE = Axis("scale", ("1.0", "0.37", "3000.0"))

register(
    Space(
        "quantize", "delayed",
        (
            DTYPE, SHAPE, ENCODING, USAGE, VALUES, COMMON, _SCALE, Axis("recorded", ("zero", "large", "none")), _OUT,
        ),
        _delayed, bits, widen=False, fixed=LATE,
    ),
    Space(
        "quantize", "current",
        (DTYPE, SHAPE, ENCODING, USAGE, VALUES, COMMON, _POWER, _EPSILON, _AMAX, _OUT),
        _current, bits, widen=False, fixed=LATE,
    ),
    Space(
        "quantize", "block",
        (
            DTYPE, SHAPE, Axis("cast", ("block_1d", "block_2d", "block_1d_laid_out", "block_2d_laid_out")), ENCODING,
            USAGE, VALUES, COMMON,
            Axis("power_of_two", ("yes", "no")), _EPSILON, _OUT,
        ),
        _block, bits, widen=False,
    ),
    Space("quantize", "mxfp8", (DTYPE, SHAPE, ENCODING, USAGE, VALUES, COMMON, _OUT), _mxfp8, bits, widen=False),
    Space(
        "quantize", "nvfp4",
        (DTYPE, SHAPE, Axis("cast", ("nvfp4", "nvfp4_2d")), USAGE, VALUES, COMMON, _AMAX, _OUT),
        _nvfp4, bits, widen=False,
        fixed=tuple({"cast": "nvfp4_2d", "shape": "33x65", "out": "fresh", "amax": "none", "usage": usage}
                    for usage in USAGE.values),
    ),
    Space(
        "quantize", "rows",
        (
            Axis("cast", ("delayed", "block_1d", "mxfp8")), ENCODING, DTYPE, Axis("shape", ("34x65", "6x256")),
            Axis("values", ("normal",)),
        ),
        _rows, bits, widen=False, batch=_half,
    ),
)  # fmt: skip
