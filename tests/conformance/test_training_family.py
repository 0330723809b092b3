# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Mistakes of optimizer steps, norms and mixture-of-experts are beyond their bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import case_of, trial_of


def _with(**changed: Any) -> Callable[[Subject, Mapping[str, Any]], Any]:
    return lambda right, arguments: right.call({**arguments, **changed})


def _next_step(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "step": arguments["step"] + 1})


def _moments_in_bf16(right: Subject, arguments: Mapping[str, Any]) -> Any:
    right.call(arguments)
    for moment in arguments["exp_avgs"]:
        moment.copy_(moment.bfloat16())


def _squares_in_the_dtype(right: Subject, arguments: Mapping[str, Any]) -> Any:
    squares = sum(x.square().sum(dtype=torch.float32) for x in arguments["tensors"])
    return torch.as_tensor(squares).sqrt().view(1)


def _largest_of_norms(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "per_tensor": True}).max().view(1)


def _rounded_twice(right: Subject, arguments: Mapping[str, Any]) -> Any:
    right.call({**arguments, "inputs": [x.bfloat16().float() for x in arguments["inputs"]]})


def _flag_left(right: Subject, arguments: Mapping[str, Any]) -> Any:
    right.call({**arguments, "noop_flag": None})


def _unsorted(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Choices of one expert in reverse order."""
    result = right.call({**arguments, "x": arguments["x"].flip(0), "indices": arguments["indices"].flip(0)})
    return result._replace(row_map=result.row_map.flip(0))


def _garbage_in_the_rest(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    result.permuted[-1] = 1
    return result


def _bf16_sum(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call(arguments).bfloat16().to(arguments["x"].dtype)


def _of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Subject, Mapping[str, Any]], Any]:
    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        return result._replace(**{name: change(getattr(result, name))})

    return mistake


_ADAM = {"dtype": "fp32", "grads": "fp32", "master": "no", "noop": "none", "values": "normal"}
_ROUTED = {"dtype": "fp32", "probs": "fp32", "dropped": "0.0", "capacity": "none", "values": "normal"}

MISTAKES: dict[str, tuple[str, dict[str, str], Any]] = {
    "adam: one step ahead": ("multi_tensor_adam", {**_ADAM, "step": "10", "correction": "yes"}, _next_step),
    "adam: no correction": ("multi_tensor_adam", {**_ADAM, "correction": "yes"}, _with(bias_correction=False)),
    "adam: decay in the gradient": ("multi_tensor_adam", {**_ADAM, "adam_w": "yes", "decay": "0.1"},
                                    _with(adam_w=False)),
    "adam: moments in bf16": ("multi_tensor_adam", _ADAM, _moments_in_bf16),
    "adam: eps left out": ("multi_tensor_adam", {**_ADAM, "eps": "0.001"}, _with(eps=1e-8)),
    "adam: flag ignored": ("multi_tensor_adam", {**_ADAM, "noop": "1"}, _with(noop_flag=None)),
    "l2norm: squares in fp16": ("multi_tensor_l2norm", {"dtype": "fp16", "values": "outlier", "per_tensor": "no"},
                                _squares_in_the_dtype),
    "l2norm: the largest": ("multi_tensor_l2norm", {"dtype": "fp32", "per_tensor": "no"}, _largest_of_norms),
    "scale: rounded before": ("multi_tensor_scale", {"dtype": "fp32", "out": "fp32"}, _rounded_twice),
    "scale: flag not raised": ("multi_tensor_scale", {"values": "nan", "noop": "0"}, _flag_left),
    "permute: not in token order": ("moe_permute", {"cast": "plain", "capacity": "none", "probs": "none"}, _unsorted),
    "permute: garbage behind": ("moe_permute", {"cast": "plain", "capacity": "more"}, _garbage_in_the_rest),
    "unpermute: probs ignored": ("moe_unpermute", _ROUTED, _with(probs=None)),
    "unpermute: summed in bf16": ("moe_unpermute", _ROUTED, _bf16_sum),
    "unpermute_bwd: probs of 1": ("moe_unpermute_bwd", _ROUTED, _of("dinput", lambda x: x * 1.01)),
    "unpermute_bwd: dprobs in bf16": ("moe_unpermute_bwd", _ROUTED, _of("dprobs", lambda x: x.bfloat16().float())),
    "dropout_add: bias ignored": ("dropout_add_fwd", {"bias": "fp32", "values": "normal"}, _with(bias=None)),
    "dropout_add_bwd: not scaled": ("dropout_add_bwd", {"dropout": "0.5"}, lambda right, a: right.call(a) * 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_beyond_the_bound(name: str) -> None:
    operator, values, mistake = MISTAKES[name]
    case = case_of(operator, "plain", **values)
    find("values").run(trial_of(case, f"torch.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"torch.{operator}", mistake))


SAMPLED = {
    "torch.unfused_attention": ("attention_fwd", {"mask": "causal", "shape": "40x16x4x2x8"}),
    "torch.dropout_add_bwd": ("dropout_add_bwd", {"shape": "300x301"}),
    "torch.multi_tensor_scale": ("multi_tensor_scale", {"shape": "300x301"}),
}


@pytest.mark.parametrize("implementation", list(SAMPLED))
def test_samples_are_judged_as_the_whole_is(implementation: str) -> None:
    """The spaces of level soak, on sizes that fit a test."""
    operator, values = SAMPLED[implementation]
    case = Case.of(operator, "huge", values)
    find("values").run(trial_of(case, implementation))

    def last_is_wrong(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        tensor = arguments["outputs"][0] if result is None else getattr(result, "out", result)
        tensor.view(-1)[-1] += 1
        return result

    with pytest.raises(Failure):
        find("values").run(trial_of(case, implementation, last_is_wrong))
