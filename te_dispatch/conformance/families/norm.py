# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `layernorm_fwd`, `layernorm_bwd`, `rmsnorm_fwd` and `rmsnorm_bwd`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.bounds import norm as bounds
from te_dispatch.conformance.bounds import rounding
from te_dispatch.conformance.bounds.known import Known, or_nan, within
from te_dispatch.conformance.families.quantize import CASTS, quantizer_of
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Instead, Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, every, register

_SHAPES = (
    "31x257", "1x1", "7x16", "3x15", "16x17", "5x127", "128x128", "2x129", "2x3x64", "1031x8", "2x4099", "0x16", "40",
)  # fmt: skip
_SMOKE_SHAPES = ("31x257", "5x127", "0x16")
#: More rows than 16 bits count; more columns than one block of threads keeps; what vectors and tiles divide; more
#: elements than 2^20.
_LARGE_SHAPES = ("65549x3", "4x8200", "2x16400", "1x70001", "8x2048", "512x64", "2x1031", "1039x1031")
#: Kinds whose squares stay finite in fp32.
_FINITE = (
    "normal", "spread", "outlier", "one_sign", "denormal", "zeros", "cancelling", "far_mean", "constant", "opposite",
    "large_squares", "square_underflow",
)  # fmt: skip
#: More than 4,096, 8,192 and 65,536 columns: an amax is that of all of them.
_WIDE = ("2x4099", "4x8200", "1x70001")
#: Values of which rstd has a cube beyond fp32 where eps is 0: 2^-44 times normal ones, which fp16 does not hold.
_SMALL = "small"
#: Those whose squares do not, and special values: without a cast, whose scale would tell of the rows beside them.
_UNCAST = ("square_overflow", "special_rows")
_CASTS = ("none", *CASTS)
#: Casts with one amax of the whole tensor.
_WHOLE = ("delayed", "current")


def _weights(values: Values, maker: Maker, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gamma and beta, of x's dtype or fp32."""
    dtype = values["dtype"] if values["weights"] == "same" else "fp32"
    return maker.tensor(columns, dtype=dtype), maker.tensor(columns, dtype=dtype)


def _forward(values: Values, maker: Maker) -> Arguments:
    shape = tuple(int(size) for size in values["shape"].split("x"))
    x = maker.tensor(*shape, dtype=values["dtype"], values=values["values"])
    gamma, beta = _weights(values, maker, shape[-1])
    arguments: Arguments = {"x": x, "gamma": gamma, "eps": float(values["eps"])}
    if "beta" in values:
        arguments["beta"] = beta if values["beta"] == "yes" else None
    arguments["zero_centered_gamma"] = values["centred"] == "yes"
    if values.get("residual", "no") == "yes":
        arguments["residual"] = maker.tensor(*shape, dtype=values["dtype"], values=values["values"])
    if values["out"] != "same":
        arguments["out_dtype"] = DTYPES[values["out"]]
    if values["cast"] != "none":
        arguments["quantizer"] = quantizer_of(values["cast"], values["encoding"], values["common"] == "yes", scale=16.0)
        arguments["usage"] = values["usage"]
        arguments["with_y"] = values["with_y"] == "yes"
    return arguments


#: One encoding, and no NaN.
_FP4 = ("nvfp4", "nvfp4_2d")

_forward_valid = every(
    lambda values: values["cast"] not in ("none", *_FP4) or values["encoding"] == "e4m3fn",
    lambda values: values["cast"] != "none" or values["common"] == "no",
    lambda values: values["cast"] != "none" or values["usage"] == "row",
    lambda values: values["cast"] != "none" or values["with_y"] == "no",
    lambda values: values["cast"] not in _FP4 or values["values"] != "nan",
    lambda values: values["cast"] == "none" or values["values"] not in _UNCAST,
    # Deviations that fp32 may lose: nothing is left to divide by.
    lambda values: values["eps"] != "0" or values["values"] not in ("denormal", "square_underflow", "far_mean"),
    # The mean of n equal numbers is a rounded sum over n: what differs from it is nothing, or an error of the mean.
    lambda values: values["eps"] != "0" or "beta" not in values or values["values"] != "constant",
)


def _residual_sum(judged: Judged) -> tuple[Known, dict[str, Rule]]:
    """x + residual as the implementation has it, and the rule for it.

    The sum of two numbers of a dtype is rounded to it directly, or through fp32. Both are one rounding of the contract;
    they differ next to a tie. So the result must be one of the two values, and what is normalized is the one that was
    returned. The oracle normalized its own, so where they differ that is an error of x.
    """
    expected = judged.expected["residual_out"].double()
    exact = judged.arguments["x"].double() + judged.arguments["residual"].double()
    got = judged.actual["residual_out"]
    through = exact.float().to(got.dtype).double()
    differing = torch.where(exact.isfinite(), (through - expected).abs(), 0.0).nan_to_num(0.0)
    flushed = sum(Known.read(judged.arguments[name]).error for name in ("x", "residual"))
    differing = differing + flushed + Known.read(expected).error
    moved = torch.minimum((got.double() - expected).abs().nan_to_num(0.0), differing)
    return Known(expected, moved + Known.read(expected).error), {"residual_out": Within(differing)}


def forward_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments = judged.arguments
    found: dict[str, Rule] = {}
    x = Known.read(arguments["x"])
    if arguments.get("residual") is not None:
        x, found = _residual_sum(judged)
    eps, zero_centered = arguments.get("eps", 1e-5), arguments.get("zero_centered_gamma", False)
    layernorm = "mean" in judged.expected
    known = bounds.forward(x, arguments["gamma"], arguments.get("beta"), eps, zero_centered, layernorm)
    beta = arguments.get("beta")
    shift = torch.zeros(known.y.value.shape[-1:]) if beta is None else beta
    for path, expected in judged.expected.items():
        if path not in ("mean", "rstd", "y"):
            continue
        actual = judged.actual[path]
        instead: tuple[Instead, ...] = (or_nan(expected.isinf()),)  # a mean that is updated meets Inf - Inf
        if path != "mean":
            instead = _lost(known.overflowed, torch.zeros(()) if path == "rstd" else shift, actual)
        found[path] = within(getattr(known, path), expected, actual, instead)
    quantizer = arguments.get("quantizer")
    if quantizer is not None:
        found |= casting.cast_rules("y_quantized", quantizer, known.y, judged.actual, judged.expected)
    return found


def _lost(overflowed: torch.Tensor, value: torch.Tensor, actual: torch.Tensor) -> tuple[Instead, ...]:
    """What a row may be whose squares overflow: what is left of it where rstd is 0, or NaN."""
    where = overflowed if overflowed.dim() == actual.dim() else overflowed.squeeze(-1)
    return Instead(where, value.double(), rounding(value, actual.dtype)), or_nan(where)


_backward_valid = every(
    # Gradients that fp16 holds, of products with gamma that it does not.
    lambda values: values["dy_values"] != "huge" or (values["dy"] == "fp16" and values["values"] == "large_squares"),
    lambda values: (values["eps"] == "0") == (values["values"] == _SMALL),
    # A row of zeros, or of one column, leaves nothing to divide by where eps is 0.
    lambda values: values["eps"] != "0" or (values["dtype"] != "fp16" and not values["shape"].endswith("x1")),
)


def _backward(values: Values, maker: Maker) -> Arguments:
    shape = tuple(int(size) for size in values["shape"].split("x"))
    layernorm = maker.case.operator == "layernorm_bwd"
    small, eps = values["values"] == _SMALL, float(values["eps"])
    x = maker.tensor(*shape, dtype=values["dtype"], values="normal" if small else values["values"])
    x = x * 2.0**-44 if small else x
    gamma, _ = _weights(values, maker, shape[-1])
    dy = maker.tensor(*shape, dtype=values["dy"], values=values["dy_values"])
    arguments: Arguments = {"dy": dy, "x": x, "gamma": gamma, "zero_centered_gamma": values["centred"] == "yes"}
    forward = {"x": x, "gamma": gamma, "eps": eps} | ({"beta": None} if layernorm else {})
    made = maker.reference("layernorm_fwd" if layernorm else "rmsnorm_fwd").call(forward)
    if layernorm:
        arguments["mean"] = made.mean
    arguments["rstd"] = made.rstd
    if values["add"] != "none":
        arguments["add"] = maker.tensor(*shape, dtype=values["dtype"] if values["add"] == "same" else values["add"])
    return arguments


def backward_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments = judged.arguments
    known = bounds.backward(
        arguments["dy"], arguments["x"], arguments["gamma"], arguments.get("mean"), arguments["rstd"],
        arguments.get("zero_centered_gamma", False), arguments.get("add"),
    )  # fmt: skip
    return {
        path: within(getattr(known, path), expected, judged.actual[path]) for path, expected in judged.expected.items()
    }


def _half(arguments: Arguments) -> Arguments:
    """The first half of the rows of everything that has rows; a cast is shared by rows (its scale, or its blocks)."""
    if arguments.get("quantizer") is not None:
        return arguments
    rows = next(arguments[name] for name in ("dy", "x") if name in arguments).shape[0] // 2
    by_row = ("dy", "x", "residual", "mean", "rstd", "add")
    return {n: v[:rows] if n in by_row and v is not None else v for n, v in arguments.items()}


_DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))
_SHAPE = Axis("shape", _SHAPES, _SMOKE_SHAPES, once=_LARGE_SHAPES)
_WEIGHTS = Axis("weights", ("same", "fp32"))
_CENTRED = Axis("centred", ("no", "yes"))
_BETA = (Axis("beta", ("yes", "no")),)


def _of(operator: str, *own: Axis) -> None:
    common = (_DTYPE, _SHAPE, _WEIGHTS, *own, _CENTRED)
    options = (
        Axis("eps", ("1e-5", "1e-12", "0.5", "0")),
        Axis("out", ("same", "fp32", "bf16", "fp16")),
        Axis("cast", _CASTS, ("none", "delayed", "current", "block_1d_laid_out", "mxfp8")),
        Axis("encoding", ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
        Axis("common", ("no", "yes")),
        Axis("usage", ("row", "both", "column")),
        Axis("with_y", ("no", "yes")),
        Axis("values", (*_FINITE, "last_columns", "nan", *_UNCAST), ("normal", "one_sign", "outlier")),
    )
    narrow = (*options[:-1], Axis("values", ("normal", "last_columns", "outlier", "cancelling", "far_mean")))
    # So many columns that kernels sum otherwise, and so few that a variance by the difference of two sums shows.
    # Of longer rows the bound hides it but where the deviation is 0.
    far = (
        {"shape": "2x1031", "values": "far_mean", "dtype": "fp32", "cast": "none", "eps": "1e-12", "out": "same"},
        *(
            {"shape": "2x4099", "values": "constant", "dtype": dtype, "cast": "none", "eps": "1e-12"}
            for dtype in ("fp32", "bf16")
        ),
    )
    # Kernels are compiled for each pair of dtypes.
    mixed = tuple(
        {"dtype": dtype, "weights": weights, "cast": "none", "values": "normal"}
        for dtype in _DTYPE.values for weights in _WEIGHTS.values
    )  # fmt: skip
    cast_wide = tuple({"shape": shape, "cast": cast, "values": "last_columns"} for shape in _WIDE for cast in _WHOLE)
    register(
        Space(
            f"{operator}_fwd", "plain", common + options, _forward, forward_rules, _forward_valid, batch=_half,
            within=({"cast": "none"},), fixed=(*cast_wide, *mixed, *far),
        ),
        # Not widened: the sum is rounded to x's dtype before it is normalized.
        Space(
            f"{operator}_fwd", "residual", (*common, Axis("residual", ("yes",)), *narrow), _forward, forward_rules,
            _forward_valid, widen=False, within=({"cast": "none"},), fixed=cast_wide,
            serves=lambda arguments: arguments.get("residual") is not None,
        ),
        Space(
            f"{operator}_bwd",
            "plain",
            (
                _DTYPE,
                _SHAPE,
                _WEIGHTS,
                _CENTRED,
                Axis("dy", ("bf16", "fp32", "fp16")),
                Axis("add", ("none", "same", "fp32")),
                Axis("values", (*_FINITE, _SMALL), ("normal", "one_sign", "outlier")),
                Axis("eps", ("1e-5", "0")),
                Axis("dy_values", ("normal", "one_sign", "spread", "zeros", "nan", "late", "huge")),
            ),
            _backward,
            backward_rules,
            _backward_valid,
            batch=_half,
            # The bound on a sum of so many rows is wider than a few of them, unless those are the largest.
            fixed=(
                *(
                    {"shape": _LARGE_SHAPES[0], "dtype": dtype, "dy": dtype, "dy_values": "late"}
                    for dtype in ("fp32", "bf16")
                ),
                *(
                    {"shape": "16x17", "dtype": dtype, "dy": "fp16", "dy_values": "huge", "values": "large_squares"}
                    for dtype in _DTYPE.values
                ),
            ),
        ),
    )  # fmt: skip


_of("layernorm", *_BETA)
_of("rmsnorm")
