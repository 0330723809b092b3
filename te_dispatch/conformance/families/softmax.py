# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `softmax_fwd` and `softmax_bwd`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.bounds import softmax as bounds
from te_dispatch.conformance.bounds.known import within
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register

_SHAPES = (
    "2x16x16", "1x1x1", "1x7x127", "3x129x33", "2x3x15x17", "1x128x128", "2x17x129", "4x1x1031", "1x1031x1", "40x16",
    "1x4x4099", "2x2x3x4x5", "0x4x8", "2x0x8", "2x4x0",
)  # fmt: skip
#: More rows than 16 bits count, in either dimension; columns beyond a block's registers and shared memory; many heads;
#: columns that vectors and tiles divide; rows that are long also where a causal mask hides what is above the diagonal.
_LARGE_SHAPES = (
    "1x65549x2", "65549x1x2", "2x3x8200", "1x2x16411", "1x1x70001", "3x17x5x7", "1x8x2048", "2x4x1536",
    "1x1100x1100",
)  # fmt: skip
_SMOKE_SHAPES = ("2x16x16", "3x129x33", "0x4x8")


def _sizes(values: Values) -> tuple[int, ...]:
    return tuple(int(size) for size in values["shape"].split("x"))


def _mask(kind: str, shape: tuple[int, ...], maker: Maker) -> torch.Tensor | None:
    """True is masked out. ``rows``: every third row wholly; ``broadcast``: one mask for all but the last dimension;
    ``column``: whole rows, of one element each; ``shared``: one for all heads, the dimension before a matrix;
    ``matrix``: of two dimensions, one for all matrices; ``vector``: of one, for all rows; ``single``: without
    dimensions."""
    if kind == "random":
        return maker.boolean(*shape, share=0.3)
    if kind == "rows":
        masked = maker.boolean(*shape, share=0.3)
        masked[..., ::3, :] = True
        return masked
    if kind == "broadcast":
        return maker.boolean(*(1,) * (len(shape) - 1), shape[-1], share=0.3)
    if kind == "column":
        return maker.boolean(*shape[:-1], 1, share=0.3)
    if kind in ("matrix", "vector"):
        return maker.boolean(*shape[-2 if kind == "matrix" else -1 :], share=0.3)
    if kind == "shared":
        return maker.boolean(*shape[:-3], *(1 for _ in shape[-3:-2]), *shape[-2:], share=0.3)
    if kind == "single":
        return maker.boolean(share=0.5)
    return torch.ones(shape, dtype=torch.bool) if kind == "all" else None


def _logits(values: Values, maker: Maker) -> torch.Tensor:
    """x; ``low``: each is below -10,000, and below what fp16 holds where the dtype holds it."""
    shape, dtype = _sizes(values), DTYPES[values["dtype"]]
    if values["values"] != "low":
        return maker.tensor(*shape, dtype=values["dtype"], values=values["values"])
    x = maker.tensor(*shape)
    return (x * 30 - 5e4 if dtype == torch.float16 else x * 1000 - 2e5).to(dtype)


def _forward(values: Values, maker: Maker) -> Arguments:
    shape = _sizes(values)
    arguments: Arguments = {"x": _logits(values, maker)}
    arguments |= {"scale": float(values["scale"]), "causal": values["causal"] == "yes"}
    mask = _mask(values["mask"], shape, maker)
    if mask is not None:
        arguments["mask"] = mask
    if values["values"] == "nan" and mask is not None and mask.shape == arguments["x"].shape:
        # What is masked out does not count, NaN or not; one row in two keeps an unmasked one.
        arguments["mask"] = mask | (arguments["x"].isnan() & (torch.arange(shape[-2]) % 2 == 0)[:, None])
    if values["out"] != "same":
        arguments["out_dtype"] = DTYPES[values["out"]]
    return arguments


def _masked(arguments: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    x, mask = arguments["x"], arguments.get("mask")
    if not arguments.get("causal", False):
        return mask
    above = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return above if mask is None else mask | above


def _forward_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments = judged.arguments
    x, masked = arguments["x"], _masked(arguments)
    known = bounds.forward(x, masked, arguments.get("scale", 1.0))
    rule = within(known, judged.expected["result"], judged.actual["result"])
    if masked is None:
        return {"result": rule}
    logits = arguments.get("scale", 1.0) * x.double()
    # Beside an unmasked NaN or a logit of Inf a masked entry may be 0, or NaN as the row's sum.
    lost = ((logits.isnan() | (logits == torch.inf)) & ~masked).any(-1, keepdim=True)
    return {"result": Within(rule.limit, ~(masked & lost).broadcast_to(x.shape))}


def _backward(values: Values, maker: Maker) -> Arguments:
    shape = _sizes(values)
    x = maker.tensor(*shape, dtype="fp32", values=values["values"])
    made = maker.reference("softmax_fwd").call({"x": x, "mask": _mask(values["mask"], shape, maker)})
    y = made.to(DTYPES[values["dtype"]])
    twice = values["dy_values"] == "y"
    arguments: Arguments = {
        "dy": y if twice else maker.tensor(*shape, dtype=values["dy"], values=values["dy_values"]),
        "y": y,
        "scale": float(values["scale"]),
    }
    if values["out"] != "same":
        arguments["out_dtype"] = DTYPES[values["out"]]
    return arguments


def _backward_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments = judged.arguments
    known = bounds.backward(arguments["dy"], arguments["y"], arguments.get("scale", 1.0))
    return {"result": within(known, judged.expected["result"], judged.actual["result"])}


def _half(arguments: Arguments) -> Arguments:
    """The first half of the leading dimension, of what has it in full."""
    x = arguments["x"] if "x" in arguments else arguments["dy"]
    rows, given = x.shape[0] // 2, ("x", "y", "dy", "mask")
    return {
        n: v[:rows] if n in given and v is not None and (v.dim(), v.shape[:1]) == (x.dim(), x.shape[:1]) else v
        for n, v in arguments.items()
    }


#: Infinite logits, and equal ones.
_SPECIAL = ("special_rows", "half_infinite", "constant")
#: Kinds of values of dy; ``y``: dy is y itself, one tensor given twice.
_GRADIENTS = ("normal", "spread", "one_sign", "cancelling", "zeros", "nan", "special_rows", "denormal", "y")
_DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
_SHAPE = Axis("shape", _SHAPES, _SMOKE_SHAPES, once=_LARGE_SHAPES)
_SCALE = Axis("scale", ("1.0", "0.125", "0.08838834764831845", "-2.5"))
_OUT = Axis("out", ("same", "fp32", "bf16", "fp16"))

_MASKS = ("none", "random", "rows", "broadcast", "column", "shared", "matrix", "vector", "single", "all")
#: Long rows without a mask, with one and under a causal one: libraries have kernels of their own for each.
_LONG = tuple(
    {"dtype": dtype, "shape": shape, "mask": mask, "causal": causal}
    for dtype in _DTYPE.values
    for shape, mask, causal in (
        ("1x4x4099", "none", "no"), ("1x4x4099", "random", "no"), ("1x1100x1100", "none", "yes"),
    )
)  # fmt: skip

register(
    Space(
        "softmax_fwd",
        "plain",
        (
            _DTYPE,
            _SHAPE,
            Axis("mask", _MASKS),
            Axis("causal", ("no", "yes")),
            _SCALE,
            _OUT,
            Axis(
                "values",
                ("normal", "spread", "outlier", "one_sign", "denormal", "zeros", "low", "nan", *_SPECIAL),
                dull=("low",),
            ),
        ),
        _forward,
        _forward_rules,
        batch=_half,
        forms=("mask",),
        together=(("dtype", "out", "causal"),),
        fixed=_LONG,
    ),
    Space(
        "softmax_bwd",
        "plain",
        (
            _DTYPE,
            _SHAPE,
            Axis("dy", ("bf16", "fp32", "fp16")),
            Axis("mask", ("none", "rows")),
            _SCALE,
            _OUT,
            Axis("values", ("normal", "spread", "zeros")),
            Axis("dy_values", _GRADIENTS),
        ),
        _backward,
        _backward_rules,
        lambda values: values["dy_values"] != "y" or values["dy"] == values["dtype"],
        batch=_half,
        together=(("dtype", "dy", "out"),),
    ),
)
