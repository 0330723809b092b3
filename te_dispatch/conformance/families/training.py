# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `dropout_add_fwd`, `dropout_add_bwd`, `multi_tensor_adam`, `multi_tensor_l2norm`, `multi_tensor_scale`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import training as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Bitwise, Open, Rule
from te_dispatch.conformance.space import Arguments, Axis, Dropout, Judged, Space, Values, register

_DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
_SHAPE = Axis("shape", ("33x65", "1x1", "17x129", "3x5x127", "1x1031", "257x3", "0x16", "16x0", "2x0x5"),
              ("33x65", "3x5x127", "0x16"))  # fmt: skip
_YES_NO = ("no", "yes")
#: Shapes of a list of tensors: sizes around vector widths, one element, none.
_LISTS = Axis("shapes", ("33x65+7+1", "16", "1+1+1", "128x129+0+3x5x7", "0", "1025+1023+1024"), ("33x65+7+1", "0"))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


# -- dropout ----------------------------------------------------------------------------------------------------------


def _dropout_add(values: Values, maker: Maker) -> Arguments:
    shape, kind = _sizes(values["shape"]), values.get("values", "normal")
    made: Arguments = {"x": maker.tensor(*shape, dtype=values["dtype"], values=kind)}
    if values["residual"] == "yes":
        made["residual"] = maker.tensor(*shape, dtype=values["dtype"], values=kind)
    if values["bias"] != "none":
        made["bias"] = maker.tensor(shape[-1], dtype=values["bias"])
    if "dropout" in values:
        made |= {"dropout_p": float(values["dropout"]), "rng_state": maker.rng_state()}
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
    if p or values["mask"] == "given":
        made["mask"] = maker.boolean(*shape, share=1 - p).to(torch.uint8)
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
    return [maker.tensor(*_sizes(shape), dtype=dtype, values=kind) for shape in values["shapes"].split("+")]


def _flag(text: str) -> torch.Tensor | None:
    return None if text == "none" else torch.full((1,), float(text))


def _adam(values: Values, maker: Maker) -> Arguments:
    kind = values["values"]
    lists: Arguments = {
        "params": _list(values, maker, values["dtype"], "normal"),
        "grads": _list(values, maker, values["grads"], kind),
        "exp_avgs": _list(values, maker, "fp32", kind),
        "exp_avg_sqs": [x.square() for x in _list(values, maker, "fp32", kind)],
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
    options = {name: given[name] for name in _HYPERPARAMETERS if name in given}
    found: dict[str, Known] = {}
    for i, param in enumerate(given["params"]):
        weights = param if master is None else master[i]
        state = given["exp_avgs"][i], given["exp_avg_sqs"][i]
        after = bounds.adam(weights, given["grads"][i], *state, **options)
        if flag is not None and bool(flag != 0):
            after = bounds.Adam(*(Known.exactly(x) for x in (weights, *state)))
        found |= {f"params.{i}": after.weights, f"exp_avgs.{i}": after.exp_avg, f"exp_avg_sqs.{i}": after.exp_avg_sq}
        found[f"master.{i}"] = after.weights
    rules: dict[str, Rule] = {}
    for path, actual in judged.actual.items():
        name = path.removeprefix("argument:")
        if flag is not None and bool(flag != 0):
            kind, _, index = name.partition(".")
            exact = given[kind][int(index)]
            rules[path] = within(Known.exactly(exact), judged.expected[path], actual)
        else:
            rules[path] = within(found[name], judged.expected[path], actual)
    return rules


def _norms(values: Values, maker: Maker) -> Arguments:
    tensors = _list(values, maker, values["dtype"], values["values"])
    return {"tensors": tensors, "per_tensor": values["per_tensor"] == "yes"}


def _norm_rules(judged: Judged) -> Mapping[str, Rule]:
    tensors = judged.arguments["tensors"]
    groups = [[x] for x in tensors] if judged.arguments["per_tensor"] else [tensors]
    norms = [bounds.norm(group) for group in groups]
    known = Known(torch.cat([n.value for n in norms]), torch.cat([n.error for n in norms]))
    return {"result": within(known, judged.expected["result"], judged.actual["result"])}


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
        known = Known.exactly(judged.arguments["inputs"][int(index)]) * judged.arguments["scale"]
        rules[path] = within(known, judged.expected[path], actual)
    return rules


_FINITE = Axis("values", ("normal", "spread", "one_sign", "zeros"), ("normal",))
_ANY = Axis("values", ("normal", "spread", "outlier", "zeros", "nan", "inf"), ("normal", "nan"))

register(
    Space(
        "dropout_add_fwd", "plain",
        (_DTYPE, _SHAPE, Axis("residual", ("yes", "no")), Axis("bias", ("none", "fp32", "bf16")), _ANY),
        _dropout_add, _dropout_add_rules, batch=_half,
    ),
    Space(
        "dropout_add_fwd", "dropped",
        (
            _DTYPE, Axis("shape", ("67x129", "1x1031", "5x7x33", "2x0x5")), Axis("residual", ("yes", "no")),
            Axis("bias", ("none", "fp32", "bf16")), Axis("dropout", ("0.1", "0.5", "0.9")), _FINITE,
        ),
        _dropout_add, _open_dropout, dropout=Dropout(_recover, _dropout_judged),
    ),
    Space(
        "dropout_add_bwd", "plain",
        (_DTYPE, _SHAPE, Axis("dropout", ("0.1", "0.0", "0.5", "0.9")), Axis("mask", ("given", "absent")), _FINITE),
        _dropout_add_bwd, _dropout_add_bwd_rules, batch=_half,
    ),
    Space(
        "multi_tensor_adam", "plain",
        (
            _DTYPE, _LISTS, Axis("grads", ("fp32", "bf16", "fp16")), Axis("master", _YES_NO), Axis("adam_w", _YES_NO),
            Axis("correction", ("yes", "no")), Axis("step", ("1", "2", "10", "1000"), ("1", "10")),
            Axis("decay", ("0.0", "0.1")), Axis("noop", ("none", "0", "1")), Axis("lr", ("0.001", "1.0")),
            Axis("beta1", ("0.9", "0.0")), Axis("beta2", ("0.999", "0.5")), Axis("eps", ("1e-8", "0.001")), _FINITE,
        ),
        _adam, _adam_rules,
    ),
    Space(
        "multi_tensor_l2norm", "plain", (_DTYPE, _LISTS, Axis("per_tensor", _YES_NO), _ANY), _norms, _norm_rules
    ),
    Space(
        "multi_tensor_scale", "plain",
        (
            _DTYPE, _LISTS, Axis("out", ("fp32", "bf16", "fp16")), Axis("scale", ("1.0", "0.3", "-65536.0")),
            Axis("noop", ("none", "0", "1")), _ANY,
        ),
        _scale, _scale_rules,
    ),
)  # fmt: skip
