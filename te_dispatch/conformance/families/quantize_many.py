# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the casts that do more than one thing: `quantize_dbias`, `split_quantize`, `multi_tensor_quantize`; and of
`pad_rows` and `unpad_rows`, which prepare for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.bounds import U32, rounding
from te_dispatch.conformance.families.quantize import (
    CASTS,
    COMMON,
    DTYPE,
    ENCODING,
    SHAPE,
    USAGE,
    VALUES,
    bits,
    counts,
    encodable,
    float_dtype,
    moved_bits,
    operand,
    quantizer_of,
)
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.numerics.quantizers import Quantizer

_CAST = Axis("cast", CASTS, ("delayed", "current", "block_1d", "block_1d_laid_out", "mxfp8"))


def _dbias(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of(values["cast"], values["encoding"], values["common"] == "yes")
    arguments: Arguments = {"x": operand(values, maker), "quantizer": quantizer, "usage": values["usage"]}
    arguments["bias_dtype"] = float_dtype(values["bias_dtype"])
    return arguments


def dbias_rules(judged: Judged) -> Mapping[str, Rule]:
    """The cast by its bits; of dbias, the sum of m rows in fp32 in any order, rounded once.

    A sum of m terms errs by (m - 1) u32 sum |x| to first order; (1 + u)^(m - 1) - 1 <= 2 (m - 1) u for (m - 1) u <= 1,
    so twice that holds all orders. Adding subnormals is exact. The sum reaches the result's dtype through one
    rounding, of a value that is off by that much: `rounding` of |sum| + error.

    Where sum |x| exceeds the largest fp32, partial sums may overflow in one order and not in another: such a column is
    open, NaN and Inf apart, which no order loses.
    """
    x = judged.arguments["x"].double()
    magnitude = x.reshape(-1, x.shape[-1]).abs() if x.numel() else x.new_zeros((0, x.shape[-1]))
    total = torch.where(magnitude.isfinite(), magnitude, 0.0).sum(0)
    error = 2 * max(magnitude.shape[0] - 1, 0) * U32 * total
    expected, dtype = judged.expected["dbias"].double(), judged.actual["dbias"].dtype
    limit = error + rounding(torch.where(expected.isfinite(), expected.abs(), 0.0) + error, dtype)
    overflows = (total > torch.finfo(torch.float32).max) & magnitude.isfinite().all(0)
    return {**bits(judged), "dbias": Within(torch.where(overflows, torch.inf, limit))}


_SPLITS = Axis(
    "splits",
    ("7+26+3", "33", "0+5+0+128", "1+127+129", "17+1+129+3", "none"),
    once=("67:5", "300:3", "3+65537"),
    dull=("none",),
)


#: Tensors of a list in which all record an amax, one of them empty.
_FEW = 5


def _several(values: Values, count: int) -> list[Quantizer]:
    """One kind and encoding, but scales, amaxes and floors of their own; in long lists some record no amax."""
    common = values["common"] == "yes"
    amaxes = [None if i % 4 == 3 and count > _FEW else float(i) for i in range(count)]
    return [
        quantizer_of(values["cast"], values["encoding"], common, scale=0.5 + i, amax=amaxes[i], epsilon=0.25 * i)
        for i in range(count)
    ]


def _split(values: Values, maker: Maker) -> Arguments:
    splits = counts(values["splits"])
    x = maker.tensor(sum(splits), int(values["k"]), dtype=values["dtype"], values=values["values"])
    return {"x": x, "splits": splits, "quantizers": _several(values, len(splits)), "usage": values["usage"]}


#: Shapes of the tensors of one call.
_SETS = {
    "like": ((16, 128),) * 3,
    "one": ((33, 65),),
    "mixed": ((3, 5, 40), (0, 16), (129, 17), (7,), (1, 1031)),
    "shrinking": ((129, 17), (3, 5, 40), (7,)),
    "repeated": ((33, 65),) * 3,  # one tensor, several times
}
#: More tensors than one launch has room for, as 25 to 330.
_LARGE_SETS = {
    **{f"{n}_like": ((3, 17),) * n for n in (25, 67, 330)},
    **{f"{n}_mixed": tuple((1 + i % 3, 16 * (i % 4) + 1) for i in range(n)) for n in (25, 67, 330)},
    # More than 2^17, and 2^20, elements in one tensor.
    "long": ((3, 17), (257, 521)),
    "longer": ((1039, 1031), (3, 17)),
}


def _multi(values: Values, maker: Maker) -> Arguments:
    shapes = {**_SETS, **_LARGE_SETS}[values["shapes"]]
    xs = [maker.tensor(*shape, dtype=values["dtype"], values=values["values"]) for shape in shapes]
    if values["shapes"] == "repeated":
        xs = xs[:1] * len(xs)
    return {"xs": xs, "quantizers": _several(values, len(xs)), "usage": values["usage"]}


_PADDINGS = {
    "to_16": ([7, 26], [16, 32]),
    "none_needed": ([16, 32], [16, 32]),
    "empty_parts": ([0, 5, 0, 127], [0, 16, 16, 128]),
    "one": ([1], [16]),
    "no_parts": ([], []),
    "odd": ([3, 3], [4, 7]),
    "to_128": ([5, 130, 1], [128, 256, 128]),
    "67_parts": ([i % 5 for i in range(67)], [4 + i % 3 for i in range(67)]),
    # More rows than 16 bits count.
    "65540_rows": ([3, 65537], [8, 65540]),
    "300_parts": ([i % 3 for i in range(300)], [2 + i % 2 for i in range(300)]),
}
_BYTES = Axis("dtype", ("bf16", "fp32", "fp16", "uint8", "int32", "int64"))
#: Integers that no narrower or floating-point dtype holds.
_INTEGERS = {
    "uint8": (torch.uint8, 0, 2**8),
    "int32": (torch.int32, -(2**31), 2**31),
    "int64": (torch.int64, -(2**62), 2**62),
}
_PADDING = Axis("splits", tuple(_PADDINGS)[:-3], once=tuple(_PADDINGS)[-3:], dull=("none_needed", "no_parts"))
_COLUMNS = Axis("k", ("64", "1", "127", "0"), once=("8209",))


def _filled(rows: int, values: Values, maker: Maker) -> torch.Tensor:
    if values["dtype"] in DTYPES:
        return maker.tensor(rows, int(values["k"]), dtype=values["dtype"], values=values["values"])
    dtype, low, high = _INTEGERS[values["dtype"]]
    return maker.integers(low, high, rows, int(values["k"]), dtype=dtype)


def _pad(values: Values, maker: Maker) -> Arguments:
    splits, padded = _PADDINGS[values["splits"]]
    return {"x": _filled(sum(splits), values, maker), "splits": splits, "padded_splits": padded}


def _unpad(values: Values, maker: Maker) -> Arguments:
    splits, padded = _PADDINGS[values["splits"]]
    return {"x": _filled(sum(padded), values, maker), "splits": splits, "padded_splits": padded}


def _first_part(arguments: Arguments) -> Arguments:
    """The call on the first of its parts alone: parts are what is independent, and their rows come first."""
    rows = (arguments["splits"][:1], arguments["padded_splits"][:1])
    taken = sum(rows[arguments["x"].shape[0] == sum(arguments["padded_splits"])])
    return {"x": arguments["x"][:taken], "splits": rows[0], "padded_splits": rows[1]}


_MOVED = Axis("values", ("normal", "nan", "zeros"))

register(
    Space(
        "quantize_dbias", "plain",
        (
            DTYPE, SHAPE, _CAST, ENCODING, USAGE, VALUES, COMMON, Axis("bias_dtype", ("none", "fp32", "bf16", "fp16")),
        ),
        _dbias, dbias_rules, valid=encodable,
    ),
    Space(
        "split_quantize", "plain",
        (
            DTYPE, _SPLITS, Axis("k", ("65", "128", "1", "0"), once=("8209",)),
            _CAST, ENCODING, USAGE, Axis("values", ("normal", "outlier", "inf", "nan", "denormal")), COMMON,
        ),
        _split, bits, valid=encodable, widen=False, together=(("cast", "encoding", "usage"),), forms=("cast",),
        fixed=(
            # One row behind several, each with an amax of its own.
            *({"splits": "17+1+129+3", "cast": cast, "values": "normal"} for cast in ("delayed", "current")),
            *({"splits": "67:5", "cast": cast} for cast in CASTS),
        ),
    ),
    Space(
        "multi_tensor_quantize", "plain",
        (
            DTYPE, Axis("shapes", tuple(_SETS), once=tuple(_LARGE_SETS)), _CAST, ENCODING, USAGE,
            Axis("values", ("normal", "outlier", "inf", "nan", "denormal"), once=("late",)), COMMON,
        ),
        _multi, bits, valid=encodable, widen=False, forms=("cast",),
        fixed=(
            # Where a maximum ends early shows where the last elements are the largest.
            *({"shapes": "long", "cast": cast, "values": "late"} for cast in CASTS),
            # Of more tensors than one launch has room for each has its own scale.
            *({"shapes": "67_mixed", "cast": cast} for cast in CASTS),
        ),
    ),
    Space("pad_rows", "plain", (_BYTES, _PADDING, _COLUMNS, _MOVED), _pad, moved_bits, widen=False, batch=_first_part),
    Space(
        "unpad_rows", "plain", (_BYTES, _PADDING, _COLUMNS, _MOVED), _unpad, moved_bits, widen=False, batch=_first_part,
    ),
)  # fmt: skip
