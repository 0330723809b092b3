# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Values and sizes of the activations' cases find mistakes that ordinary data hide, and refuse nothing allowed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.coverage import goals_of
from te_dispatch.conformance.space import find as find_space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.ops.activation import KINDS

from .trials import Mistake, case_of, trial_of


def _relu_of_nan_is_zero(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    return result._replace(out=torch.where(arguments["x"].isnan(), 0.0, result.out).to(result.out.dtype))


def _clamped_nan_is_the_limit(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "x": arguments["x"].nan_to_num(7.0, torch.inf, -torch.inf)})


def _gradient_of_nan_is_zero(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    return result._replace(dx=torch.where(arguments["x"].isnan(), 0.0, result.dx).to(result.dx.dtype))


def _multiplied_by_the_step(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """0 times NaN where the step is 0."""
    result = right.call(arguments)
    dx = arguments["dy"].float() * ~(arguments["x"].float() <= 0)
    return result._replace(dx=dx.to(result.dx.dtype))


def _derivative_in_fp32(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """gelu' as it is written: 0 times an infinite slope."""
    x, result = arguments["x"].float(), right.call(arguments)
    t = 0.7978845608028654 * (x + 0.044715 * x**3)
    bell = 1 - torch.tanh(t).square()
    slope = 0.5 * (1 + torch.tanh(t)) + 0.5 * x * bell * 0.7978845608028654 * (1 + 0.134145 * x * x)
    return result._replace(dx=(arguments["dy"].float() * slope).to(result.dx.dtype))


def _wide_logistic_in_fp32(right: Subject, arguments: Mapping[str, Any]) -> Any:
    x, result = arguments["x"].float(), right.call(arguments)
    s = torch.sigmoid(x)
    e = torch.exp(x)
    return result._replace(out=torch.where(x > 0, x * e / (1 + e), x * s).to(result.out.dtype))


def _rows_past_16_bits(name: str) -> Mistake:
    def wrong(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        found = getattr(result, name)
        found[1 << 16 :] = 0
        return result

    return wrong


def _bias_gradient_of_65536_rows(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    few = {name: arguments[name][: 1 << 16] for name in ("x", "dy")}
    return result._replace(dbias=right.call({**arguments, **few}).dbias)


_PLAIN = {"dtype": "fp32", "cast": "none", "record": "none"}
_BACK = {**_PLAIN, "dy": "fp32", "dbias": "no"}

MISTAKES: dict[str, tuple[str, str, dict[str, str], Mistake]] = {
    "relu(NaN) = 0": ("activation_fwd", "plain", {**_PLAIN, "kind": "relu", "values": "nan"}, _relu_of_nan_is_zero),
    "clamp(NaN) = limit": (
        "activation_fwd", "plain", {**_PLAIN, "kind": "clamped_swiglu", "values": "nan", "params": "default"},
        _clamped_nan_is_the_limit,
    ),
    "relu'(NaN) = 0": (
        "activation_bwd", "plain", {**_BACK, "kind": "relu", "values": "nan", "dy_values": "normal"},
        _gradient_of_nan_is_zero,
    ),
    "relu' multiplies": (
        "activation_bwd", "plain", {**_BACK, "kind": "relu", "values": "normal", "dy_values": "nan"},
        _multiplied_by_the_step,
    ),
    "gelu' of huge": ("activation_bwd", "extreme", {"kind": "gelu", "dtype": "fp32", "values": "huge"},
                      _derivative_in_fp32),
    "gelu' of every exponent": ("activation_bwd", "extreme", {"kind": "gelu", "dtype": "bf16", "values": "log_uniform"},
                                _derivative_in_fp32),
    "silu by exp(x)": ("activation_fwd", "extreme", {"kind": "silu", "dtype": "fp32", "values": "huge"},
                       _wide_logistic_in_fp32),
    "rows past 65,535": ("activation_fwd", "plain", {**_PLAIN, "kind": "silu", "shape": "65549x2"},
                         _rows_past_16_bits("out")),
    "rows past 65,535, backward": (
        "activation_bwd", "plain", {**_BACK, "kind": "swiglu", "shape": "65549x2", "dy_values": "normal"},
        _rows_past_16_bits("dx"),
    ),
    "bias gradient of 65,536 rows": (
        "activation_bwd", "plain", {**_PLAIN, "shape": "65549x2", "dy": "fp32", "dbias": "yes", "dy_values": "late"},
        _bias_gradient_of_65536_rows,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    operator, space, values, mistake = MISTAKES[name]
    case = case_of(operator, space, **values)
    find("values").run(trial_of(case, f"reference.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"reference.{operator}", mistake))


@pytest.mark.parametrize("kind", ("relu", "clamped_swiglu"))
def test_nan_passes_relu_and_clamps_of_torch(kind: str) -> None:
    values = {**_BACK, "kind": kind, "values": "nan", "dy_values": "normal", "params": "default"}
    find("values").run(trial_of(case_of("activation_bwd", "plain", **values), "torch.activation_bwd"))


def _flushed(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        return x
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x).to(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", ("activation_fwd", "activation_bwd"))
def test_subnormals_may_be_flushed(operator: str, kind: str) -> None:
    def flushing(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call({name: _flushed(value) for name, value in arguments.items()})
        return result._replace(**{name: _flushed(value) for name, value in result._asdict().items()})

    case = case_of(operator, "plain", **{**_PLAIN, "kind": kind, "values": "denormal"})
    find("values").run(trial_of(case, f"torch.{operator}", flushing))


@pytest.mark.parametrize("operator, other", (("activation_fwd", "out"), ("activation_bwd", "dy")))
def test_every_kind_meets_every_dtype_of_both_sides(operator: str, other: str) -> None:
    """A function that is wrong for one kind in one pair of dtypes is judged there."""
    space = find_space(operator, "plain")
    axes = {axis.name: axis.values for axis in space.axes}
    goals = set(goals_of(space))
    for values in itertools.product(axes["kind"], axes["dtype"], axes[other]):
        assert tuple(zip(("kind", "dtype", other), values)) in goals
