# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Parameters that are not the module's own tensors: parametrizations, pruning, FSDP's views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import parametrize, prune

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
}
RECIPES = {"high precision": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}
NAMES = ("layer_norm_weight", "layer_norm_bias")


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized(module: torch.nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Doubled())


def pruned(module: torch.nn.Module, name: str) -> None:
    prune.l1_unstructured(module, name, amount=0.5)


def as_views(module: torch.nn.Module, name: str) -> None:
    """As FullyShardedDataParallel with use_orig_params=False leaves them: plain attributes that are views."""
    parameter = getattr(module, name)
    delattr(module, name)
    module.flat = torch.nn.Parameter(torch.cat([parameter.detach(), torch.zeros(1)]))
    setattr(module, name, module.flat[:-1])


def trained(module: torch.nn.Module, x: torch.Tensor, recipe: str) -> list[torch.Tensor]:
    given = x.clone().requires_grad_()
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = module(given)
    y.square().sum().backward()
    assert given.grad is not None
    return [y.detach(), given.grad]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("replaced", [parametrized, pruned, as_views])
@pytest.mark.parametrize("parameter", NAMES)
@pytest.mark.parametrize("name", MODULES)
def test_norm_parameters_are_what_the_attribute_gives(
    name: str, parameter: str, replaced: Callable[[torch.nn.Module, str], None], recipe: str
) -> None:
    torch.manual_seed(0)
    module, plain = MODULES[name](), MODULES[name]()
    with torch.no_grad():
        for each in NAMES:
            getattr(module, each).normal_()
    plain.load_state_dict(module.state_dict())
    replaced(module, parameter)
    with torch.no_grad():
        getattr(plain, parameter).copy_(getattr(module, parameter))
    x = torch.randn(16, 32)
    for _ in range(3):  # the later calls take the steps of the first
        if replaced is as_views:
            setattr(module, parameter, module.flat[:-1])
        for found, expected in zip(trained(module, x, recipe), trained(plain, x, recipe)):
            assert torch.equal(found, expected)
    sources = {
        parametrized: f"parametrizations.{parameter}.original", pruned: f"{parameter}_orig", as_views: "flat"
    }  # fmt: skip
    grad = module.get_parameter(sources[replaced]).grad
    assert grad is not None
    of_plain = plain.get_parameter(parameter).grad
    if replaced is pruned:
        assert torch.equal(grad, of_plain * getattr(module, f"{parameter}_mask"))
    else:
        assert torch.equal(grad[:32], of_plain * (2 if replaced is parametrized else 1))
