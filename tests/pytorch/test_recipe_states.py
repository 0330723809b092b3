# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`RecipeState`: a recipe's quantizers cast as modules under the recipe do."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.pytorch.fp8 import recipe_state as states
from te_dispatch.pytorch.fp8.quantizer_factories import current_scaling_factory, delayed_scaling_factory
from te_dispatch.pytorch.fp8.recipe_state import RecipeState

RECIPES = [
    Float8CurrentScaling(use_power_2_scales=True),
    Float8BlockScaling(),
    MXFP8BlockScaling(enable_2d_quantization=True),
    NVFP4BlockScaling(),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
]


def said(quantizer: te.Quantizer | None) -> tuple[str, dict[str, object]]:
    return type(quantizer).__name__, vars(quantizer)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_quantizers_are_those_of_a_module(recipe: Recipe) -> None:
    module = te.Linear(64, 64, device="cpu")
    with te.autocast(recipe=recipe):
        module(torch.randn(64, 64)).sum().backward()
    forward = RecipeState.create(recipe, mode="forward", num_quantizers=4, device="cpu").make_quantizers()
    backward = RecipeState.create(recipe, mode="backward", num_quantizers=2, device="cpu").make_quantizers()
    x, w, _ = module.quantizers["scaling_fwd"]
    assert list(map(said, forward)) == [said(x), said(w), said(x), said(x)]
    assert list(map(said, backward)) == [said(module.quantizers["scaling_bwd"][0])] * 2


@pytest.mark.parametrize("recipe", [DelayedScaling(), *RECIPES, CustomRecipe(qfactory=current_scaling_factory)])
def test_a_state_is_of_its_recipes_class(recipe: Recipe) -> None:
    state = RecipeState.create(recipe, mode="backward", device="cpu")
    assert type(state).__name__ == f"{type(recipe).__name__}RecipeState" or isinstance(state, states.CustomRecipeState)
    by_factory = isinstance(recipe, CustomRecipe)
    fp8 = te.DType.kFloat8E4M3 if isinstance(recipe, Float8BlockScaling | MXFP8BlockScaling) else te.DType.kFloat8E5M2
    assert state.dtype == (None if by_factory else te.DType.kFloat4E2M1 if recipe.nvfp4() else fp8)
    assert not state.inherit_state_from(RecipeState.create(Float8CurrentScaling(), mode="backward", device="cpu"))


def test_roles_say_what_quantizers_are_for() -> None:
    roles = [te.QuantizerRole("linear", "weight"), None, te.QuantizerRole("dpa", "qkv")]
    state = RecipeState.create(Float8BlockScaling(), mode="forward", num_quantizers=3, device="cpu", roles=roles)
    assert [quantizer.block_scaling_dim for quantizer in state.make_quantizers()] == [2, 2, 1]
    with pytest.raises(ValueError, match="roles must be 2, one for each quantizer, got 3"):
        RecipeState.create(Float8BlockScaling(), mode="forward", num_quantizers=2, device="cpu", roles=roles)


def test_delayed_scaling_has_tensors() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2, device="cpu")
    assert isinstance(state, states.DelayedScalingRecipeState) and state.amax_history.shape == (4, 2)
    other = RecipeState.create(recipe, mode="forward", num_quantizers=2, device="cpu")
    assert other.inherit_state_from(state)
    first, second = other.make_quantizers()
    state.scale[1] = 2.0
    x = torch.tensor([[3.0, -5.0] * 8] * 16)
    assert torch.equal(second(x).dequantize(), x) and second(x)._scale_inv.item() == 0.5
    assert state.amax_history[0].tolist() == [0.0, 5.0] and first.dtype is te.DType.kFloat8E4M3
    short = RecipeState.create(DelayedScaling(amax_history_len=3), mode="forward", num_quantizers=2, device="cpu")
    assert not short.inherit_state_from(state)


def test_a_factory_is_asked_for_each_place() -> None:
    roles = [te.QuantizerRole("linear", "grad_output"), None]
    recipe = CustomRecipe(qfactory=current_scaling_factory)
    state = RecipeState.create(recipe, mode="backward", num_quantizers=2, device="cpu", roles=roles)
    dtypes = [quantizer.dtype for quantizer in state.make_quantizers()]
    assert dtypes == [te.DType.kFloat8E5M2, te.DType.kFloat8E4M3]
    asking = RecipeState.create(CustomRecipe(qfactory=delayed_scaling_factory), mode="forward", device="cpu")
    with pytest.raises(NotImplementedError, match="qfactory returned a DelayedScalingRequest"):
        asking.make_quantizers()


def test_what_is_no_recipe_or_direction_is_refused() -> None:
    with pytest.raises(TypeError, match=r"recipe must be one of te_dispatch\.common\.recipe"):
        RecipeState.create("mxfp8", mode="forward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RecipeState: mode must be one of 'forward', 'backward', got 'sideways'"):
        RecipeState.create(MXFP8BlockScaling(), mode="sideways", device="cpu")
    with pytest.raises(NotImplementedError, match="RecipeState: DelayedScaling asks for fp8_dpa=True"):
        RecipeState.create(DelayedScaling(fp8_dpa=True), mode="forward", device="cpu")
