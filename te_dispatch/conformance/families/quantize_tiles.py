# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of casts to MXFP8 in 32x32 tiles, and to NVFP4 whose blocks choose between 4 and 6.

`quantize` and its kin are judged by bits, which settle each choice. Operators that cast what they compute are judged
within the interval of what they may have computed (`te_dispatch.conformance.casting`), where either choice is right.
"""

from __future__ import annotations

import dataclasses

import torch

from te_dispatch.conformance.families import activation, norm
from te_dispatch.conformance.families.quantize import (
    COMMON,
    DTYPE,
    ENCODING,
    USAGE,
    bits,
    operand,
    quantizer_of,
    sizes,
)
from te_dispatch.conformance.families.quantize_many import dbias_rules
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, register
from te_dispatch.numerics.quantizers import NVFP4FourOverSixQuantizer, Quantizer

#: With partial tiles of 16 and 32 both ways, of 3 dimensions and one, without rows or columns.
_SHAPE = Axis("shape", ("33x65", "64x64", "17x15", "1x1031", "3x5x40", "7", "0x16", "16x0"), ("33x65",))
_VALUES = Axis(
    "values", ("normal", "spread", "outlier", "zeros", "denormal", "saturation", "ties", "inf", "nan"),
    ("normal", "outlier"),
)  # fmt: skip
_OUT = Axis("out", ("fresh", "both", "flag_set"), dull=("flag_set",))
_AMAX = Axis("amax", ("none", "small", "zero", "nan"))
_GIVEN = {"small": 0.5, "zero": 0.0, "nan": torch.nan}
_CAST = Axis("cast", ("mxfp8_2d", "nvfp4_4over6", "nvfp4_4over6_2d"))
_FOUR_OVER_SIX = Axis("cast", ("nvfp4_4over6", "nvfp4_4over6_2d"))
_SCALE_MAX = Axis("scale_max", ("256", "448"))
_ERROR = Axis("error", ("MAE", "MSE"))


def _quantizer(values: Values) -> Quantizer:
    found = quantizer_of(values["cast"], values.get("encoding", "e4m3fn"), values["common"] == "yes")
    if isinstance(found, NVFP4FourOverSixQuantizer) and "error" in values:
        return dataclasses.replace(found, scale_max=int(values["scale_max"]), error=values["error"])
    return found


def _call(values: Values, maker: Maker) -> Arguments:
    return {"x": operand(values, maker), "quantizer": _quantizer(values), "usage": values["usage"]}


def _cast(values: Values, maker: Maker) -> Arguments:
    arguments = _call(values, maker)
    if values["out"] != "fresh":
        x = arguments["x"]
        arguments["out"] = maker.quantized(maker.tensor(*x.shape, dtype=values["dtype"]), _quantizer(values), "both")
    if values["out"] == "flag_set":
        arguments["noop_flag"] = torch.ones(1)
    if values.get("amax", "none") != "none":
        arguments["amax"] = torch.full((1,), _GIVEN[values["amax"]])
    return arguments


def _tiles(values: Values, maker: Maker) -> Arguments:
    return _cast({**values, "cast": "mxfp8_2d"}, maker)


_SPLITS = {"33+64": (33, 64), "32+0+7": (32, 0, 7)}


def _split(values: Values, maker: Maker) -> Arguments:
    splits = list(_SPLITS[values["splits"]])
    x = maker.tensor(sum(splits), 40, dtype=values["dtype"])
    return {"x": x, "splits": splits, "quantizers": [_quantizer(values) for _ in splits], "usage": values["usage"]}


def _multi(values: Values, maker: Maker) -> Arguments:
    arguments = _split(values, maker)
    xs = list(arguments.pop("x").split(arguments.pop("splits")))
    return {"xs": xs, **arguments}


def _activation(values: Values, maker: Maker) -> Arguments:
    arguments = {**_call(values, maker), "kind": "gelu"}
    if maker.case.operator == "activation_bwd":
        arguments["dy"] = maker.tensor(*sizes(values), dtype=values["dtype"])
    return arguments


def _norm(values: Values, maker: Maker) -> Arguments:
    arguments = {**_call(values, maker), "eps": 1e-5}
    columns = sizes(values)[-1]
    arguments["gamma"] = maker.tensor(columns, dtype=values["dtype"])
    if maker.case.operator == "layernorm_fwd":
        arguments["beta"] = maker.tensor(columns, dtype=values["dtype"])
    return arguments


_FEW = Axis("shape", ("33x65", "64x64"))
_PLAIN = Axis("values", ("normal",))

register(
    Space(
        "quantize", "mxfp8_2d", (DTYPE, _SHAPE, ENCODING, USAGE, _VALUES, COMMON, _OUT), _tiles, bits, widen=False,
    ),
    Space(
        "quantize", "nvfp4_4over6",
        (DTYPE, _SHAPE, _FOUR_OVER_SIX, _SCALE_MAX, _ERROR, USAGE, _VALUES, COMMON, _AMAX, _OUT),
        _cast, bits, widen=False,
    ),
    Space(
        "quantize_dbias", "tiles_and_choices", (_CAST, DTYPE, _FEW, USAGE, _PLAIN, COMMON), _call, dbias_rules,
        widen=False,
    ),
    *(
        Space(
            operator, "tiles_and_choices", (_CAST, DTYPE, Axis("splits", tuple(_SPLITS)), USAGE, COMMON), make, bits,
            widen=False,
        )
        for operator, make in (("split_quantize", _split), ("multi_tensor_quantize", _multi))
    ),
    *(
        Space(operator, "tiles_and_choices", (_CAST, DTYPE, _FEW, USAGE, _PLAIN, COMMON), make, rules)
        for operator, make, rules in (
            ("activation_fwd", _activation, activation.forward_rules),
            ("activation_bwd", _activation, activation.backward_rules),
            ("layernorm_fwd", _norm, norm.forward_rules),
            ("rmsnorm_fwd", _norm, norm.forward_rules),
        )
    ),
)  # fmt: skip
