# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts beyond the sizes and values at which kernels change: each kernel here is right on all smaller calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.space import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from tests.conformance.trials import Mistake, case_of, trial_of

pytestmark = pytest.mark.sampled(6)

Given = Mapping[str, Any]


def _values(operator: str, space: str, kernel: Mistake | None = None, **values: str) -> None:
    implementation = {"grouped_gemm": "torch.grouped_matmul"}.get(operator, f"torch.{operator}")
    find_check("values").run(trial_of(case_of(operator, space, **values), implementation, kernel))


def _narrow(right: Subject, given: Given) -> Any:
    """Columns past 8,192 are left out."""
    made = right.call(given)
    made.row_data[..., 8192:] = 0
    return made


def _short_list(right: Subject, given: Given) -> Any:
    """The 65th tensor and later ones have the code 0."""
    made = right.call(given)
    for record in made[64:]:
        record.row_data.zero_()
    return made


def _few_histories(right: Subject, given: Given) -> Any:
    count = min(len(given["histories"]), 24)
    lists = ("histories", "scales", "max_values", "amaxes")
    return right.call({n: v[:count] if n in lists and v is not None else v for n, v in given.items()})


def _few_groups(right: Subject, given: Given) -> Any:
    made = right.call(given)
    for out in made[17:]:
        out.zero_()
    return made


def _few_blocks(right: Subject, given: Given) -> Any:
    """Blocks whose rows begin past 65,535 are left out."""
    made = right.call(given)
    made[512:] = 0
    return made


@pytest.mark.parametrize(
    ("operator", "space", "axis", "large", "small", "kernel"),
    [
        ("quantize", "delayed", "shape", "3x8209", "33x65", _narrow),
        ("quantize", "current", "shape", "2x16403", "127x129", _narrow),
        ("multi_tensor_quantize", "plain", "shapes", "67_like", "like", _short_list),
        ("multi_tensor_quantize", "plain", "shapes", "330_mixed", "mixed", _short_list),
        ("split_quantize", "plain", "splits", "67:5", "1+127+129", _short_list),
        ("update_delayed_scales", "plain", "histories", "25", "several", _few_histories),
        ("partial_amax", "plain", "shard", "rows", "whole", _few_blocks),
        ("grouped_gemm", "plain", "rows", "18:5", "1+127+16+5", _few_groups),
    ],
)
def test_a_kernel_that_is_wrong_above_a_size(
    operator: str, space: str, axis: str, large: str, small: str, kernel: Mistake
) -> None:
    assert large in next(a.once for a in find(operator, space).axes if a.name == axis)
    _values(operator, space, **{axis: large})
    _values(operator, space, kernel, **{axis: small})
    with pytest.raises(Failure):
        _values(operator, space, kernel, **{axis: large})


@pytest.mark.parametrize("flag", ["flag_half", "flag_minus", "flag_tiny", "flag_nan", "flag_minus_zero"])
@pytest.mark.parametrize("space", ["delayed", "block", "mxfp8"])
def test_flags_that_are_not_one(space: str, flag: str) -> None:
    def kernel(right: Subject, given: Given) -> Any:
        """Set means 1."""
        skipped = given["noop_flag"].item() == 1.0
        return right.call({**given, "noop_flag": torch.full((1,), float(skipped))})

    _values("quantize", space, out=flag)
    if flag != "flag_minus_zero":
        with pytest.raises(Failure):
            _values("quantize", space, kernel, out=flag)
