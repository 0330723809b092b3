# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Values and sizes of softmax's cases find mistakes that ordinary data hide, and refuse nothing that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import Mistake, case_of, trial_of


def _online(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """By tiles of 64 columns, whose running maximum starts at -Inf: -Inf less -Inf is NaN in a tile of nothing else."""
    result = right.call(arguments)
    z = arguments["x"].float() * arguments["scale"]
    top, total = torch.full(z.shape[:-1], -torch.inf), torch.zeros(z.shape[:-1])
    for tile in z.split(64, -1):
        higher = torch.maximum(top, tile.amax(-1))
        total = total * torch.exp(top - higher) + torch.exp(tile - higher[..., None]).sum(-1)
        top = higher
    return (torch.exp(z - top[..., None]) / total[..., None]).to(result.dtype)


def _large_for_infinite(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """-Inf taken for a large number, as masks are often made: a row of nothing else comes out uniform."""
    return right.call({**arguments, "x": arguments["x"].clamp_min(-10_000.0)})


def _nan_left_out(right: Subject, arguments: Mapping[str, Any]) -> Any:
    return right.call({**arguments, "x": arguments["x"].nan_to_num(0.0, torch.inf, -torch.inf)})


def _first_columns(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Columns that 1,024 threads keep 8 of each."""
    result = torch.zeros_like(arguments["x"])
    result[..., :8192] = right.call({**arguments, "x": arguments["x"][..., :8192]})
    return result


def _first_rows(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    result.flatten(0, -2)[1 << 16 :] = 0
    return result


_CASE = {"dtype": "fp32", "out": "same", "mask": "none", "causal": "no", "scale": "1.0"}
_BACK = {"dtype": "fp32", "out": "same", "mask": "none", "scale": "1.0", "dy": "fp32", "dy_values": "normal"}

MISTAKES: dict[str, tuple[str, dict[str, str], Mistake]] = {
    "tiles of -Inf": ("softmax_fwd", {**_CASE, "values": "half_infinite", "shape": "4x1x1031"}, _online),
    "a row of -Inf is uniform": ("softmax_fwd", {**_CASE, "values": "special_rows"}, _large_for_infinite),
    "NaN left out": ("softmax_fwd", {**_CASE, "values": "special_rows"}, _nan_left_out),
    "columns past 8,192": ("softmax_fwd", {**_CASE, "values": "normal", "shape": "2x3x8200"}, _first_columns),
    "rows past 65,535": ("softmax_fwd", {**_CASE, "values": "normal", "shape": "1x65549x2"}, _first_rows),
    "matrices past 65,535": ("softmax_fwd", {**_CASE, "values": "normal", "shape": "65549x1x2"}, _first_rows),
    "rows past 65,535, backward": ("softmax_bwd", {**_BACK, "values": "normal", "shape": "1x65549x2"}, _first_rows),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    operator, values, mistake = MISTAKES[name]
    case = case_of(operator, "plain", **values)
    find("values").run(trial_of(case, f"torch.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"torch.{operator}", mistake))


@pytest.mark.parametrize("mask", ("none", "random", "broadcast"))
@pytest.mark.parametrize("implementation", ("reference.softmax_fwd", "torch.softmax_fwd"))
def test_a_row_of_nothing_but_infinity_is_zero(implementation: str, mask: str) -> None:
    def not_zero(right: Subject, arguments: Mapping[str, Any]) -> Any:
        empty = (arguments["x"] == -torch.inf).all(-1, keepdim=True)
        return torch.where(empty, torch.nan, right.call(arguments))

    case = case_of("softmax_fwd", "plain", **{**_CASE, "values": "special_rows", "mask": mask})
    find("values").run(trial_of(case, implementation))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, implementation, not_zero))


def test_a_fully_masked_row_is_zero_whatever_it_holds() -> None:
    def not_zero(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        return torch.where(arguments["mask"].all(-1, keepdim=True), torch.nan, result)

    case = case_of("softmax_fwd", "plain", **{**_CASE, "values": "special_rows", "mask": "rows"})
    find("values").run(trial_of(case, "torch.softmax_fwd"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, "torch.softmax_fwd", not_zero))
