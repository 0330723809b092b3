# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes whose casts may run on another backend than their products: `CustomRecipe`, MXFP8 in tiles, NVFP4."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.common.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from tests.gpu.layer_losses import losses
from tests.pytorch.custom_factories import EQUALS, MODULES, made, same, seen

#: Recipes that draw nothing, so that the CPU's results are the same up to the order of sums.
STEADY = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8_2d": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4_rht": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_4over6": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
}


@pytest.mark.parametrize("recipe", EQUALS)
@pytest.mark.parametrize("module", MODULES)
def test_a_factory_that_says_what_a_recipe_says_gives_its_bits(module: str, recipe: str) -> None:
    builtin, factory = EQUALS[recipe]
    theirs = seen(made(module, device="cuda"), builtin(), steps=3)
    assert all(tensor.is_cuda for tensor in theirs)
    assert same(seen(made(module, device="cuda"), CustomRecipe(factory), steps=3), theirs)


@pytest.mark.parametrize("recipe", STEADY)
def test_a_product_is_that_of_the_cpu(recipe: str) -> None:
    """Codes of the operands are equal by bits, so that only the order of the sums differs."""
    layer = made("Linear", device="cuda")
    ours = seen(layer, STEADY[recipe])
    theirs = seen(layer.cpu(), STEADY[recipe])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
    assert not same([tensor.cpu() for tensor in seen(made("Linear", device="cuda"), None)], theirs)


@pytest.mark.parametrize("recipe", [*STEADY.values(), NVFP4BlockScaling()], ids=[*STEADY, "nvfp4"])
def test_a_layer_trains(recipe: Recipe) -> None:
    found = losses(lambda: recipe)
    assert found[-1] < 0.95 * found[0], found
