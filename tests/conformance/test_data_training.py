# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists, sizes, steps, values and masks of training's cases find mistakes that ordinary data hide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import Mistake, case_of, trial_of

_ADAM_LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "master")


def _first_tensors(count: int, *names: str) -> Mistake:
    """What a table of so many pointers holds."""

    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        cut = {name: arguments[name][:count] for name in names if arguments.get(name) is not None}
        return right.call({**arguments, **cut})

    return mistake


def _first_elements(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "tensors": [x[: 1 << 17] for x in arguments["tensors"]]})


def _step_in_16_bits(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "step": max(int(np.int64(arguments["step"]).astype(np.int16)), 1)})


def _power_in_fp32(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """beta^step as fp32's product of fp32's betas: the weights move by the quotient of the corrections."""
    exact = [1 - arguments[beta] ** arguments["step"] for beta in ("beta1", "beta2")]
    rounded = [1 - float(np.float32(arguments[b]) ** np.float32(arguments["step"])) for b in ("beta1", "beta2")]
    factor = (rounded[1] / exact[1]) ** 0.5 * exact[0] / rounded[0]
    return right.call({**arguments, "lr": arguments["lr"] * factor})


def _only_one_stops(right: Subject, arguments: Mapping[str, Any]) -> Any:
    flag = arguments["noop_flag"]
    return right.call({**arguments, "noop_flag": (flag == 1).float()})


def _finite_gradients(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "grads": [g.nan_to_num() for g in arguments["grads"]]})


def _squared_in_fp32(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """g * g, which overflows: the second moment is infinite, and the weights stay."""
    before = [p.clone() for p in arguments["params"]]
    right.call(arguments)
    for param, old, grad, square in zip(arguments["params"], before, arguments["grads"], arguments["exp_avg_sqs"]):
        lost = grad.float().square().isinf()
        square[lost] = torch.inf
        decayed = old * (1 - arguments["lr"] * arguments["weight_decay"]) if arguments["adam_w"] else old
        param[lost] = decayed.to(param.dtype)[lost]


def _doubled_beyond_overflow(right: Subject, arguments: Mapping[str, Any]) -> Any:
    right.call(arguments)
    for square in arguments["exp_avg_sqs"]:
        square *= 2


def _sum_of_squares(right: Subject, arguments: Mapping[str, Any]) -> Any:
    total = torch.stack([x.float().square().sum() for x in arguments["tensors"]])
    return (total if arguments["per_tensor"] else total.sum().view(1)).sqrt()


def _squares_cut_off(right: Subject, arguments: Mapping[str, Any]) -> Any:
    total = torch.stack([x.float().square().clamp_max(1e30).sum() for x in arguments["tensors"]])
    return (total if arguments["per_tensor"] else total.sum().view(1)).sqrt()


def _multiplied_by_the_mask(right: Subject, arguments: Mapping[str, Any]) -> Any:
    factor = arguments["mask"].float() / (1 - arguments["dropout_p"])
    return (arguments["dy"].float() * factor).to(arguments["dy"].dtype)


_ADAM = {"dtype": "fp32", "grads": "fp32", "master": "no", "noop": "none", "values": "normal", "beta2": "0.999"}
_L2 = {"dtype": "fp32", "per_tensor": "no"}
_SCALE = {"dtype": "fp32", "out": "fp32", "values": "normal", "noop": "none"}

MISTAKES: dict[str, tuple[str, dict[str, str], Mistake]] = {
    "adam: 24 tensors": ("multi_tensor_adam", {**_ADAM, "shapes": "7*25"}, _first_tensors(24, *_ADAM_LISTS)),
    "adam: 110 tensors": ("multi_tensor_adam", {**_ADAM, "shapes": "5*111"}, _first_tensors(110, *_ADAM_LISTS)),
    "scale: 64 tensors": ("multi_tensor_scale", {**_SCALE, "shapes": "17*65"}, _first_tensors(64, "inputs", "outputs")),
    "l2norm: 320 tensors": ("multi_tensor_l2norm", {**_L2, "shapes": "3*321"}, _first_tensors(320, "tensors")),
    "l2norm: 2^17 elements": ("multi_tensor_l2norm", {**_L2, "shapes": "131085", "values": "late"}, _first_elements),
    "l2norm: squares cut off": ("multi_tensor_l2norm", {**_L2, "values": "large_squares"}, _squares_cut_off),
    "l2norm: overflow cut off": ("multi_tensor_l2norm", {**_L2, "values": "square_overflow"}, _squares_cut_off),
    "adam: step in 16 bits": ("multi_tensor_adam", {**_ADAM, "step": "100000", "correction": "yes"}, _step_in_16_bits),
    "adam: step in 15 bits": ("multi_tensor_adam", {**_ADAM, "step": "32768", "correction": "yes"}, _step_in_16_bits),
    "adam: beta^step in fp32": ("multi_tensor_adam", {**_ADAM, "step": "1000", "correction": "yes", "lr": "1.0"},
                                _power_in_fp32),
    "adam: a flag of 2.5 goes on": ("multi_tensor_adam", {**_ADAM, "noop": "2.5"}, _only_one_stops),
    "adam: a flag of NaN goes on": ("multi_tensor_adam", {**_ADAM, "noop": "nan"}, _only_one_stops),
    "adam: NaN gradients left out": ("multi_tensor_adam", {**_ADAM, "values": "nan"}, _finite_gradients),
    "adam: Inf gradients left out": ("multi_tensor_adam", {**_ADAM, "values": "inf"}, _finite_gradients),
    "adam: finite and wrong beyond overflow": ("multi_tensor_adam", {**_ADAM, "values": "square_overflow"},
                                               _doubled_beyond_overflow),
    "dropout_add_bwd: 0 times Inf": ("dropout_add_bwd", {"dropout": "0.5", "values": "inf"}, _multiplied_by_the_mask),
}  # fmt: skip

LEGAL: dict[str, tuple[str, dict[str, str], Mistake]] = {
    "adam: squares overflow": ("multi_tensor_adam", {**_ADAM, "values": "square_overflow"}, _squared_in_fp32),
    "l2norm: squares overflow": ("multi_tensor_l2norm", {**_L2, "values": "square_overflow"}, _sum_of_squares),
    "l2norm: squares vanish": ("multi_tensor_l2norm", {**_L2, "values": "square_underflow"}, _sum_of_squares),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    operator, values, mistake = MISTAKES[name]
    case = case_of(operator, "plain", **values)
    find("values").run(trial_of(case, f"torch.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"torch.{operator}", mistake))


@pytest.mark.parametrize("name", list(LEGAL))
def test_legal_variations_pass(name: str) -> None:
    operator, values, variation = LEGAL[name]
    find("values").run(trial_of(case_of(operator, "plain", **values), f"torch.{operator}", variation))


# -- masks ------------------------------------------------------------------------------------------------------------


def _with_mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """Dropout by a mask that is made of the right one."""

    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        mask = change(result.mask)
        y = arguments["x"].float() + (0 if arguments.get("bias") is None else arguments["bias"].float())
        out = torch.where(mask != 0, y / (1 - arguments["dropout_p"]), 0.0)
        out = out + (0 if arguments.get("residual") is None else arguments["residual"].float())
        return result._replace(out=out.to(result.out.dtype), mask=mask)

    return mistake


def _repeated(period: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(mask.numel()) % period
        return mask.flatten()[places].reshape(mask.shape)

    return change


def _with_state(change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        return right.call({**arguments, "rng_state": change(arguments["rng_state"])})

    return mistake


def _in_8_bits(right: Subject, arguments: Mapping[str, Any]) -> Any:
    p = round(arguments["dropout_p"] * 256) / 256
    return right.call({**arguments, "dropout_p": p})


_DROPPED = {"dtype": "fp32", "values": "normal", "shape": "67x129", "dropout": "0.1"}

MASKS: dict[str, tuple[dict[str, str], Mistake]] = {
    "the same in every row": ({}, _with_mask(_repeated(129))),
    "the same in every other row": ({}, _with_mask(_repeated(258))),
    "the same every 4,096 elements": ({}, _with_mask(_repeated(4096))),
    "the same every 1,000 elements": ({"dropout": "0.9"}, _with_mask(_repeated(1000))),
    "the same every 65,536 elements": ({"shape": "257x521"}, _with_mask(_repeated(1 << 16))),
    "high bits of the seed left out": ({}, _with_state(lambda s: s & torch.tensor([0xFFFFFFFF, -1]))),
    "high bits of the offset left out": ({}, _with_state(lambda s: s & torch.tensor([-1, 0xFFFFFFFF]))),
    "the lowest bits of the offset left out": ({}, _with_state(lambda s: s & torch.tensor([-1, -4]))),
    "p in 8 bits": ({"shape": "257x521", "dropout": "0.002"}, _in_8_bits),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_that_depend_on_too_little_are_found(name: str) -> None:
    values, mistake = MASKS[name]
    case = case_of("dropout_add_fwd", "dropped", **{**_DROPPED, **values})
    find("dropout").run(trial_of(case, "torch.dropout_add_fwd"))
    with pytest.raises(Failure):
        find("dropout").run(trial_of(case, "torch.dropout_add_fwd", mistake))


@pytest.mark.parametrize("shape", ("67x129", "257x521"))
def test_another_generator_s_masks_pass(shape: str) -> None:
    """The reference's are Philox's."""
    case = case_of("dropout_add_fwd", "dropped", **{**_DROPPED, "shape": shape})
    find("dropout").run(trial_of(case, "reference.dropout_add_fwd"))
