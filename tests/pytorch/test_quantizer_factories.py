# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Factories that are named for built-in recipes give their bits; what a factory cannot ask for is refused by name."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.pytorch.fp8 import quantizer_factories as factories
from te_dispatch.pytorch.fp8.quantizer_request import DelayedScalingRequest, QuantizerRequest
from tests.pytorch.custom_factories import made, same, seen


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("high_precision", None),
        ("current_scaling", Float8CurrentScaling()),
        ("float8_block_scaling", Float8BlockScaling()),
        ("mxfp8", MXFP8BlockScaling()),
        ("nvfp4", NVFP4BlockScaling()),
    ],
)
def test_a_factory_gives_the_bits_of_its_recipe(name: str, recipe: Recipe | None) -> None:
    factory = getattr(factories, f"{name}_factory")
    assert same(seen(made("LayerNormMLP"), CustomRecipe(qfactory=factory)), seen(made("LayerNormMLP"), recipe))
    assert factory(None) is not None  # what leaves a module quantized has no role


def test_delayed_scaling_is_refused_where_a_module_is_given_it() -> None:
    request = factories.delayed_scaling_factory(te.QuantizerRole("linear", "input"))
    assert request == DelayedScalingRequest() and isinstance(request, QuantizerRequest)
    assert (request.fp8_format, request.amax_history_len, request.reduce_amax) == (Format.HYBRID, 1024, True)
    module = te.Linear(32, 32, device="cpu")
    with (
        te.autocast(recipe=CustomRecipe(qfactory=factories.delayed_scaling_factory)),
        pytest.raises(NotImplementedError, match=r"DelayedScalingRequest for Linear's input .* recipe DelayedScaling"),
    ):
        module(torch.randn(32, 32))
