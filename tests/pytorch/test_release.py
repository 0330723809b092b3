# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules and the tensors of their calls are freed with their last reference, without a garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

pytestmark = pytest.mark.sampled(6)

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "Linear, split": lambda: te.Linear(32, 32, parameters_split=("a", "b"), device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "MultiheadAttention": lambda: te.MultiheadAttention(32, 2, attention_dropout=0.0, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
}
RECIPES = {"high precision": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def step(module: torch.nn.Module, x: torch.Tensor, recipe: Recipe | None) -> None:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.sum().backward()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_trained_module_is_freed_at_once(name: str, recipe: str, steps: int) -> None:
    module = MODULES[name]()
    watched = [weakref.ref(module), *[weakref.ref(part) for part in module.modules()]]
    watched += [weakref.ref(parameter) for parameter in module.parameters()]
    for _ in range(steps):
        x = torch.randn(16, 1, 32, requires_grad=True)
        watched.append(weakref.ref(x))
        step(module, x, RECIPES[recipe])
        del x
        assert watched[-1]() is None
    del module
    assert [ref() for ref in watched if ref() is not None] == []


def test_an_output_does_not_keep_the_module() -> None:
    module = te.Linear(32, 32, device="cpu")
    watched = weakref.ref(module)
    y = module(torch.randn(16, 32))
    del module
    assert watched() is None
    y.sum().backward()
