# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `dropout_add_fwd`, `dropout_add_bwd`, `multi_tensor_adam`, `multi_tensor_l2norm`, `multi_tensor_scale`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import rounding
from te_dispatch.conformance.bounds import training as bounds
from te_dispatch.conformance.bounds.known import Known, or_nan, within
from te_dispatch.conformance.inputs import BEYOND_HALF, ENDS
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Bitwise, Instead, Open, Rule
from te_dispatch.conformance.space import Arguments, Axis, Dropout, Judged, Space, Values, register

_DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
#: Of the tensors of a list, which may have different ones in turn.
_DTYPES = Axis("dtype", (*_DTYPE.values, "bf16+fp32"), _DTYPE.values)
_SHAPE = Axis("shape", ("33x65", "1x1", "17x129", "3x5x127", "1x1031", "257x3", "0x16", "16x0", "2x0x5"),
              ("33x65", "3x5x127", "0x16"), once=("65549x3", "4x16411", "131x1031", "64x512", "1039x1031"))  # fmt: skip
_YES_NO = ("no", "yes")
#: Of a mask: more elements than 2^17, which tell a probability from one of 8 bits.
_MANY = "257x521"
#: One tensor of more than 2^17 elements.
_LONG = "131085"
#: One of more than 2^20.
_LONGER = "1048609"
#: Shapes of a list of tensors (``7*25``: 25 tensors of 7 elements; ``scalar``: without dimensions): sizes around vector
#: widths, one element, none.
#: Once: more tensors than kernels take as arguments (24, 30, 64, 110, 320), and more elements than chunks of 2^16.
_LISTS = Axis(
    "shapes", ("33x65+7+1", "16", "1+1+1", "7+scalar+16", "128x129+0+3x5x7", "0", "1025+1023+1024"), ("33x65+7+1", "0"),
    once=("7*25", "17*65", "5*111", "3*321", f"65549+{_LONG}", _LONG, _LONGER),
)  # fmt: skip


def _sizes(text: str) -> tuple[int, ...]:
    return () if text == "scalar" else tuple(int(n) for n in text.split("x"))


# -- dropout ----------------------------------------------------------------------------------------------------------


def _dropout_add(values: Values, maker: Maker) -> Arguments:
    shape, kind = _sizes(values["shape"]), values.get("values", "normal")
    made: Arguments = {"x": maker.tensor(*shape, dtype=values["dtype"], values=kind)}
    if values["residual"] == "yes":
        made["residual"] = maker.tensor(*shape, dtype=values["dtype"], values=kind)
    if values["bias"] != "none":
        made["bias"] = maker.tensor(shape[-1], dtype=values["bias"], values=kind if kind == BEYOND_HALF else "normal")
        if kind == BEYOND_HALF:  # the bias alone is beyond fp16, its sum with x is not
            made["x"] = (made["x"].sign() * 0.125 - 0.5) * made["bias"].to(made["x"].dtype).clamp(-60000, 60000)
    if "dropout" in values:
        made["dropout_p"] = float(values["dropout"])
    if "dropout" in values or values["state"] == "given":
        made["rng_state"] = maker.rng_state()
    return made


def _dropped(arguments: Mapping[str, Any], keep: torch.Tensor | None) -> Known:
    bias, residual = arguments.get("bias"), arguments.get("residual")
    return bounds.dropout_add(arguments["x"], bias, residual, keep, arguments.get("dropout_p", 0.0))


def _dropout_add_rules(judged: Judged) -> Mapping[str, Rule]:
    return {"out": within(_dropped(judged.arguments, None), judged.expected["out"], judged.actual["out"])}


def _open_dropout(judged: Judged) -> Mapping[str, Rule]:
    return dict.fromkeys(judged.actual, Open("depends on which elements fall; the check `dropout` judges it"))


def _recover(run: Callable[[Arguments], Any], arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    mask = run(arguments).mask.cpu()
    return mask != 0, torch.ones_like(mask, dtype=torch.bool)


def _dropout_judged(judged: Judged, keep: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Rule]]:
    """The mask is 0 or 1, and what its elements say it is."""
    known = _dropped(judged.arguments, keep)
    expected = {"out": known.value.float(), "mask": keep.to(torch.uint8)}
    return expected, {"out": within(known, expected["out"], judged.actual["out"]), "mask": Bitwise()}


def _dropout_add_bwd(values: Values, maker: Maker) -> Arguments:
    shape, p = _sizes(values["shape"]), float(values["dropout"])
    made: Arguments = {"dy": maker.tensor(*shape, dtype=values["dtype"], values=values["values"]), "dropout_p": p}
    if p or values["mask"] == "given":  # with a p of 0, too, what a mask drops is dropped
        made["mask"] = maker.boolean(*shape, share=1 - p if p else 0.7).to(torch.uint8)
    return made


def _dropout_add_bwd_rules(judged: Judged) -> Mapping[str, Rule]:
    mask = judged.arguments.get("mask")
    keep = None if mask is None else mask != 0
    dx = bounds.dropout_add(judged.arguments["dy"], None, None, keep, judged.arguments["dropout_p"])
    return {"result": within(dx, judged.expected["result"], judged.actual["result"])}


def _half(arguments: Arguments) -> Arguments:
    rows = next(iter(arguments.values())).shape[0] // 2
    by_row = ("x", "residual", "dy", "mask")
    return {name: value[:rows] if name in by_row else value for name, value in arguments.items()}


# -- lists of tensors -------------------------------------------------------------------------------------------------


def _list(values: Values, maker: Maker, dtype: str, kind: str) -> list[torch.Tensor]:
    parts = [part.partition("*") for part in values["shapes"].split("+")]
    shapes = [_sizes(shape) for shape, _, count in parts for _ in range(int(count or 1))]
    kinds = [kind] * len(shapes)
    if kind in ENDS:  # of the list: one tensor of it has the special element
        kinds = [kind if i == (0 if kind == "nan_first" else len(shapes) - 1) else "normal" for i in range(len(shapes))]
    dtypes = itertools.cycle(dtype.split("+"))
    return [maker.tensor(*shape, dtype=one, values=of) for shape, of, one in zip(shapes, kinds, dtypes)]


def _flag(text: str) -> torch.Tensor | None:
    return None if text == "none" else torch.full((1,), float(text))


#: Kinds that only gradients have: moments that were right before hold no such values.
_OF_GRADIENTS = ("nan", "inf", "square_overflow", "square_underflow")


def _adam(values: Values, maker: Maker) -> Arguments:
    kind = values["values"]
    moments = "normal" if kind in _OF_GRADIENTS else kind
    lists: Arguments = {
        "params": _list(values, maker, values["dtype"], "normal"),
        "grads": _list(values, maker, values["grads"], kind),
        "exp_avgs": _list(values, maker, "fp32", moments),
        "exp_avg_sqs": [x.square() for x in _list(values, maker, "fp32", moments)],
    }
    if values["master"] == "yes":
        lists["master"] = _list(values, maker, "fp32", "normal")
    return {
        **lists, "lr": float(values["lr"]), "beta1": float(values["beta1"]), "beta2": float(values["beta2"]),
        "eps": float(values["eps"]), "step": int(values["step"]), "weight_decay": float(values["decay"]),
        "adam_w": values["adam_w"] == "yes", "bias_correction": values["correction"] == "yes",
        "noop_flag": _flag(values["noop"]),
    }  # fmt: skip


_HYPERPARAMETERS = ("lr", "beta1", "beta2", "eps", "step", "weight_decay", "adam_w", "bias_correction")


def _adam_rules(judged: Judged) -> Mapping[str, Rule]:
    """Elements of every list within their bounds; nothing changes where the flag is up."""
    given = judged.arguments
    flag, master = given.get("noop_flag"), given.get("master")
    if flag is not None and bool(flag != 0):
        return _unchanged(judged)
    options = {name: given[name] for name in _HYPERPARAMETERS if name in given}
    found: dict[str, tuple[Known, Instead]] = {}
    for i, param in enumerate(given["params"]):
        weights = param if master is None else master[i]
        state = given["exp_avgs"][i], given["exp_avg_sqs"][i]
        after = bounds.adam(weights, given["grads"][i], *state, **options)
        unmoved = after.unmoved
        limit = unmoved.error + rounding(unmoved.value, param.dtype)
        stopped = Instead(after.overflowed, unmoved.value, limit)
        infinite = Instead(after.overflowed, torch.tensor(torch.inf).double(), torch.zeros(()))
        # Interpolated, an infinite gradient meets itself.
        interpolated = or_nan(after.exp_avg.value.isinf())
        found |= {f"params.{i}": (after.weights, stopped), f"master.{i}": (after.weights, stopped)}
        found |= {f"exp_avgs.{i}": (after.exp_avg, interpolated), f"exp_avg_sqs.{i}": (after.exp_avg_sq, infinite)}
    rules: dict[str, Rule] = {}
    for path, actual in judged.actual.items():
        known, other = found[path.removeprefix("argument:")]
        rules[path] = within(known, judged.expected[path], actual, (other,))
    return rules


def _unchanged(judged: Judged) -> Mapping[str, Rule]:
    """A step that the flag skips."""
    rules: dict[str, Rule] = {}
    for path, actual in judged.actual.items():
        kind, _, index = path.removeprefix("argument:").partition(".")
        rules[path] = within(Known.exactly(judged.arguments[kind][int(index)]), judged.expected[path], actual)
    return rules


def _norms(values: Values, maker: Maker) -> Arguments:
    tensors = _list(values, maker, values["dtype"], values["values"])
    return {"tensors": tensors, "per_tensor": values["per_tensor"] == "yes"}


def _norm_rules(judged: Judged) -> Mapping[str, Rule]:
    tensors = judged.arguments["tensors"]
    groups = [[x] for x in tensors] if judged.arguments["per_tensor"] else [tensors]
    norms = [bounds.norm(group) for group in groups]
    known = Known(torch.cat([n.value for n in norms]), torch.cat([n.error for n in norms]))
    overflowed = known.value.square() > bounds.LARGEST_SQUARE
    infinite = Instead(overflowed, torch.tensor(torch.inf).double(), torch.zeros(()))
    return {"result": within(known, judged.expected["result"], judged.actual["result"], (infinite,))}


def _scale(values: Values, maker: Maker) -> Arguments:
    inputs = _list(values, maker, values["dtype"], values["values"])
    outputs = _list(values, maker, values["out"], "normal")
    return {
        "inputs": inputs, "outputs": outputs, "scale": float(values["scale"]), "noop_flag": _flag(values["noop"]),
    }  # fmt: skip


def _scale_rules(judged: Judged) -> Mapping[str, Rule]:
    """A product in fp32 and a rounding; the flag by its bits."""
    rules: dict[str, Rule] = {}
    for path, actual in judged.actual.items():
        name, _, index = path.removeprefix("argument:").partition(".")
        if name == "noop_flag":
            rules[path] = Bitwise()
            continue
        known = Known.read(judged.arguments["inputs"][int(index)]) * judged.arguments["scale"]
        rules[path] = within(known, judged.expected[path], actual)
    return rules


_ANY = Axis("values", ("normal", "spread", "outlier", "zeros", "nan", "inf", "denormal"), ("normal", "nan"), once=ENDS)
#: What is dropped is 0, NaN or not.
_DROPPED = Axis("values", ("normal", "spread", "one_sign", "zeros", "nan", "inf"), ("normal", "nan"))
_SQUARES = Axis(
    "values", (*_ANY.values, "large_squares", "square_overflow", "square_underflow", "late"), _ANY.smoke, once=ENDS
)
_GRADIENTS = Axis("values", ("normal", "spread", "one_sign", "zeros", "denormal", *_OF_GRADIENTS), ("normal", "nan"))
#: 0 goes on, of either sign, everything else stops.
_NOOP = Axis("noop", ("none", "0", "1", "-0.0", "2.5", "nan"), dull=("1", "2.5", "nan"))

register(
    Space(
        "dropout_add_fwd", "plain",
        (
            _DTYPE, _SHAPE, Axis("residual", ("yes", "no")), Axis("bias", ("none", "fp32", "bf16")),
            Axis("state", ("absent", "given")), Axis("values", _ANY.values, _ANY.smoke, once=(*ENDS, BEYOND_HALF)),
        ),
        _dropout_add, _dropout_add_rules, batch=_half,
        fixed=tuple({"dtype": "fp16", "bias": bias, "values": BEYOND_HALF} for bias in ("fp32", "bf16")),
    ),
    Space(
        "dropout_add_fwd", "dropped",
        (
            _DTYPE, Axis("shape", ("67x129", "1x1031", "5x7x33", "2x0x5"), once=(_MANY,)),
            Axis("residual", ("yes", "no")),
            Axis("bias", ("none", "fp32", "bf16")), Axis("dropout", ("0.1", "0.5", "0.9"), once=("0.002",)), _DROPPED,
        ),
        _dropout_add, _open_dropout, dropout=Dropout(_recover, _dropout_judged),
        fixed=({"shape": _MANY, "dropout": "0.002"}, {"shape": _MANY, "dropout": "0.5"}),
    ),
    Space(
        "dropout_add_bwd", "plain",
        (_DTYPE, _SHAPE, Axis("dropout", ("0.1", "0.0", "0.5", "0.9")), Axis("mask", ("given", "absent")), _DROPPED),
        _dropout_add_bwd, _dropout_add_bwd_rules, batch=_half,
    ),
    Space(
        "multi_tensor_adam", "plain",
        (
            _DTYPE, _LISTS, Axis("grads", ("fp32", "bf16", "fp16")), Axis("master", _YES_NO), Axis("adam_w", _YES_NO),
            Axis("correction", ("yes", "no")),
            Axis("step", ("1", "2", "10", "1000"), ("1", "10"), once=("32768", "100000")),
            Axis("decay", ("0.0", "0.1")), _NOOP, Axis("lr", ("0.001", "1.0", "0.0")),
            Axis("beta1", ("0.9", "0.0", "0.9995")), Axis("beta2", ("0.999", "0.5")),
            Axis("eps", ("1e-8", "0.001")), _GRADIENTS,
        ),
        _adam, _adam_rules,
        fixed=tuple(
            {"dtype": "fp32", "step": step, "correction": "yes", "noop": "none", "beta2": "0.999", "values": "normal"}
            for step in ("1000", "32768", "100000")
        ),
    ),
    Space(
        "multi_tensor_l2norm", "plain", (_DTYPES, _LISTS, Axis("per_tensor", _YES_NO), _SQUARES), _norms, _norm_rules,
        # The bound on a sum of so many squares is wider than a few of them, unless those are the largest.
        fixed=(
            *({"shapes": _LONG, "values": "late", "dtype": dtype} for dtype in _DTYPE.values[:2]),
            {"shapes": "1+1+1", "dtype": _DTYPES.values[-1]},
        ),
    ),
    Space(
        "multi_tensor_scale", "plain",
        (
            _DTYPES, _LISTS, Axis("out", ("fp32", "bf16", "fp16", "fp16+fp32")),
            Axis("scale", ("1.0", "0.3", "-65536.0", "0.0")), _NOOP,
            Axis("values", (*_ANY.values, "sum_overflow"), _ANY.smoke, once=_ANY.once),
        ),
        _scale, _scale_rules,
        # In a list of several tensors: the flag is raised for any of them, and in one that takes several launches for
        # those of any launch.
        fixed=tuple(
            {"values": kind, "noop": "0", "shapes": shapes}
            for shapes in (_LISTS.values[0], *_LISTS.once[:4])
            for kind in ENDS
        ),
    ),
)  # fmt: skip
