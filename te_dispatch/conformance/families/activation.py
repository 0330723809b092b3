# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `activation_fwd` and `activation_bwd`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds import activation as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.families.quantize import CASTS, quantizer_of
from te_dispatch.conformance.families.quantize_forms import OTHER_LAYOUTS
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, every, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED, KINDS

#: Of the forward's result; a gated kind's x has twice the columns.
_SHAPES = (
    "31x37",
    "1x1",
    "15x16",
    "16x17",
    "127x129",
    "128x128",
    "129x127",
    "3x5x64",
    "1x1031",
    "1031x1",
    "0x16",
    "48",
)
_SMOKE_SHAPES = ("31x37", "127x129", "0x16")
_CASTS = ("none", *CASTS)
#: What x is a record of.
_RECORDS = ("none", "delayed", "current", "block_1d", "block_2d", "mxfp8", "nvfp4")
#: More rows than 16 bits count, wide rows, more elements than 2^17 and 2^20, what vectors and tiles divide.
_LARGE_SHAPES = ("65549x2", "3x16411", "131x1031", "256x512", "2x65557", "1039x1031")
_PARAMS = {"default": None, "5/1": (5.0, 1.0), "0.5/1.702": (0.5, 1.702)}


def _x(values: Values, maker: Maker) -> torch.Tensor | Quantized:
    shape = [int(size) for size in values["shape"].split("x")]
    if values["kind"] in GATED:
        shape[-1] *= 2
    at_limits = values["values"] == "at_limits"
    x = maker.tensor(*shape, dtype=values["dtype"], values="normal" if at_limits else values["values"])
    if at_limits:
        limit = (_PARAMS[values["params"]] or CLAMPED_SWIGLU)[0]
        for share, value in ((0.25, limit), (0.25, -limit), (0.125, 0.0)):
            x = torch.where(maker.boolean(*shape, share=share), torch.tensor(value, dtype=x.dtype), x)
    if values["record"] == "none":
        return x
    copies, laid_out, _ = values["copies"].partition("_laid_out")
    record = maker.quantized(x, quantizer_of(values["record"], values["x_encoding"]), copies)
    return maker.laid_out(record, OTHER_LAYOUTS[record.scaling]) if laid_out else record


def _options(values: Values, maker: Maker) -> Arguments:
    arguments: Arguments = {"kind": values["kind"]}
    if values["params"] != "default":
        arguments["params"] = _PARAMS[values["params"]]
    if values["cast"] != "none":
        arguments["quantizer"] = quantizer_of(values["cast"], values["encoding"], values["common"] == "yes", scale=16.0)
        arguments["usage"] = values["usage"]
    return arguments


def _forward(values: Values, maker: Maker) -> Arguments:
    arguments: Arguments = {"x": _x(values, maker)} | _options(values, maker)
    arguments["with_out"] = values["beside"] == "yes"
    if values["out"] != "same":
        arguments["out_dtype"] = DTYPES[values["out"]]
    return arguments


def _backward(values: Values, maker: Maker) -> Arguments:
    shape = [int(size) for size in values["shape"].split("x")]
    dy = maker.tensor(*shape, dtype=values["dy"], values=values["dy_values"])
    arguments: Arguments = {"dy": dy, "x": _x(values, maker)} | _options(values, maker)
    arguments["with_dx"] = values["beside"] == "yes"
    arguments["with_dbias"] = values["dbias"] == "yes"
    return arguments


#: One encoding, and no NaN.
_FP4 = ("nvfp4", "nvfp4_2d")


#: Tensors in and out: half of the other axes' pairs would be seen with records alone.
_UNCAST = {"record": "none", "cast": "none"}
_valid = every(
    lambda values: values["params"] == "default" or values["kind"] == "clamped_swiglu",
    lambda values: values["record"] not in ("none", *_FP4) or values["x_encoding"] == "e4m3fn",
    lambda values: values["record"] != "none" or values["copies"] == "row",
    lambda values: not values["copies"].endswith("_laid_out") or values["record"] in OTHER_LAYOUTS,
    lambda values: values["cast"] not in ("none", *_FP4) or values["encoding"] == "e4m3fn",
    lambda values: values["cast"] != "none" or values["common"] == "no",
    lambda values: values["cast"] != "none" or values["usage"] == "row",
    # A record holds other values than its tensor did.
    lambda values: values["values"] != "at_limits" or values["record"] == "none",
    *(
        lambda values, axis=axis, name=name, those=those: values[name] not in those or values.get(axis) != "nan"
        for axis in ("values", "dy_values")
        for name, those in (("cast", _FP4), ("record", _FP4))
    ),
)


def _operand(x: torch.Tensor | Quantized) -> Known:
    """x; the values of a record are rounded to fp32 before they are used (`dequantize`)."""
    if not isinstance(x, Quantized):
        return Known.read(x)
    found = casting.values(x).reshape(x.shape)
    return Known(found, found.abs() * U32)


def forward_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments = judged.arguments
    y = bounds.forward(_operand(arguments["x"]), arguments["kind"], arguments.get("params"))
    found: dict[str, Rule] = {}
    if "out" in judged.expected:
        found["out"] = within(y, judged.expected["out"], judged.actual["out"])
    if arguments.get("quantizer") is not None:
        found |= casting.cast_rules("out_quantized", arguments["quantizer"], y, judged.actual, judged.expected)
    return found


def backward_rules(judged: Judged) -> Mapping[str, Rule]:
    """dbias is the sum over rows of what dx is before it is rounded."""
    arguments = judged.arguments
    x = _operand(arguments["x"])
    dx = bounds.backward(Known.read(arguments["dy"]), x, arguments["kind"], arguments.get("params"))
    found: dict[str, Rule] = {}
    if "dx" in judged.expected:
        found["dx"] = within(dx, judged.expected["dx"], judged.actual["dx"])
    if "dbias" in judged.expected:
        columns = dx.value.shape[-1]
        dbias = dx.reshape(dx.value.numel() // max(columns, 1), columns).sum(0)
        found["dbias"] = within(dbias, judged.expected["dbias"], judged.actual["dbias"])
    if arguments.get("quantizer") is not None:
        found |= casting.cast_rules("dx_quantized", arguments["quantizer"], dx, judged.actual, judged.expected)
    return found


#: Values of the axes that a space leaves out.
_PLAINEST = {"params": "default", "record": "none", "cast": "none", "beside": "no", "dbias": "no"}
_KINDS_OF_VALUES = ("normal", "spread", "outlier", "one_sign", "denormal", "zeros", "saturation")
#: ``at_limits``, which level smoke leaves out: many elements are where a clamp begins, and where relu's gradient jumps.
_VALUES = Axis("values", (*_KINDS_OF_VALUES, "at_limits", "last_columns", "nan"), (*_KINDS_OF_VALUES, "nan"))
#: More than 1,024 and 16,384 columns.
_WIDE = ("131x1031", "3x16411")
#: Every kind in rows that no block holds whole, of 16 and 32 bits.
_WIDE_KINDS = tuple(
    {"kind": kind, "dtype": dtype, "shape": _WIDE[-1], "record": "none", "cast": "none", "values": "normal"}
    for kind in KINDS
    for dtype in ("bf16", "fp32")
)

#: Records of each scaling with many scales in another layout, where reading the scale of another block shows.
_LAID_OUT = tuple(
    {"record": record, "copies": copies, "kind": "silu", "shape": "131x1031", "values": "spread", "cast": "none"}
    for record in OTHER_LAYOUTS
    for copies in ("row_laid_out", "column_laid_out")
)

_X = (
    Axis("kind", KINDS, ("gelu", "swiglu", "relu", "clamped_swiglu")),
    Axis("dtype", ("bf16", "fp32", "fp16")),
    Axis("shape", _SHAPES, _SMOKE_SHAPES, once=_LARGE_SHAPES),
    Axis("params", tuple(_PARAMS)),
    Axis("record", _RECORDS, ("none", "current")),
    Axis("x_encoding", ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    Axis("copies", ("row", "both", "column"), ("row", "both"), once=("row_laid_out", "column_laid_out")),
    Axis("cast", _CASTS, ("none", "delayed", "current", "block_1d_laid_out", "mxfp8")),
    Axis("encoding", ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    Axis("common", ("no", "yes")),
    Axis("usage", ("row", "both", "column")),
    Axis("beside", ("no", "yes")),
)


def _half(arguments: Arguments) -> Arguments:
    """The first half of the rows; a record's cannot be cut, and a cast is shared by them (its scale, or its blocks)."""
    if isinstance(arguments["x"], Quantized) or arguments.get("quantizer") is not None:
        return arguments
    rows = arguments["x"].shape[0] // 2
    return {n: v[:rows] if n in ("x", "dy") else v for n, v in arguments.items()}


_DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))
_EXTREME_SHAPE = Axis("shape", ("31x37", "16x17", "129x128"))


def _extreme_valid(values: Values) -> bool:
    """Not where a product of two large numbers overflows before another factor makes it small: in which order factors
    are multiplied is the implementation's choice."""
    if values["values"] != "log_uniform" or values["kind"] in ("gelu", "qgelu", "relu", "silu"):
        return True
    return "out" in values and values["kind"] in GATED and values["kind"] != "sreglu"


def _extreme_forward(values: Values, maker: Maker) -> Arguments:
    return _forward({**_PLAINEST, **values}, maker)


def _extreme_backward(values: Values, maker: Maker) -> Arguments:
    return _backward({**_PLAINEST, **values, "dy_values": "one_sign"}, maker)


register(
    Space(
        "activation_fwd",
        "plain",
        (
            *_X,
            Axis("out", ("same", "fp32", "bf16", "fp16")),
            _VALUES,
        ),
        _forward,
        forward_rules,
        _valid,
        batch=_half,
        together=(("kind", "dtype", "out"), ("kind", "cast", "usage")),
        within=(_UNCAST,),
        # An amax is that of all columns.
        fixed=_WIDE_KINDS + _LAID_OUT + tuple(
            {"shape": shape, "cast": cast, "values": "last_columns"}
            for shape in _WIDE for cast in ("delayed", "current")
        ),
    ),
    Space(
        "activation_bwd",
        "plain",
        (
            *_X,
            Axis("dy", ("bf16", "fp32", "fp16")),
            Axis("dbias", ("no", "yes")),
            _VALUES,
            Axis("dy_values", ("normal", "one_sign", "cancelling", "zeros", "nan", "late")),
        ),
        _backward,
        backward_rules,
        _valid,
        batch=_half,
        together=(("kind", "dtype", "dy"), ("kind", "cast", "usage")),
        within=(_UNCAST,),
        # The bound on a bias gradient of so many rows is wider than a few of them, unless those are the largest.
        fixed=tuple({**values, "dy_values": "normal"} for values in (*_WIDE_KINDS, *_LAID_OUT)) + tuple(
            {"shape": _LARGE_SHAPES[0], "dtype": dtype, "dy": dtype, "dbias": "yes", "dy_values": "late"}
            for dtype in ("fp32", "bf16")
        ),
    ),
    Space(
        "activation_fwd", "extreme",
        (
            Axis("kind", KINDS), _DTYPE, _EXTREME_SHAPE, Axis("out", ("same", "fp32", "bf16")),
            Axis("values", ("huge", "log_uniform", "special_rows")),
        ),
        _extreme_forward, forward_rules, _extreme_valid, batch=_half, like="plain",
    ),
    Space(
        "activation_bwd", "extreme",
        (
            Axis("kind", KINDS), _DTYPE, _EXTREME_SHAPE, Axis("dy", ("fp32", "bf16", "fp16")),
            Axis("values", ("huge", "log_uniform")),
        ),
        _extreme_backward, backward_rules, _extreme_valid, batch=_half, like="plain",
    ),
)  # fmt: skip
