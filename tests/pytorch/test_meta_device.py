# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Models made on the meta device get memory and values from `reset_parameters`, as in Transformer Engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.arguments import resolve_device

BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(32, 48, parallel_mode="row", **kw),
    "Linear, divided": lambda **kw: te.Linear(32, 48, parameters_split=("q", "k", "v"), **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, zero_centered_gamma=True, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(32, 48, set_parallel_mode=True, **kw),
    "LayerNorm": lambda **kw: te.LayerNorm(32, sequence_parallel=True, **kw),
    "RMSNorm": lambda **kw: te.RMSNorm(32, zero_centered_gamma=True, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(32, 64, 2, hidden_dropout=0, attention_dropout=0, **kw),
}


def reset(model: torch.nn.Module) -> None:
    """What frameworks do with a model that they made on the meta device."""
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("name", BUILDERS)
def test_it_becomes_what_a_model_made_with_memory_is(name: str) -> None:
    torch.manual_seed(0)
    made, real = BUILDERS[name](device="meta"), BUILDERS[name]()
    assert all(parameter.is_meta for parameter in made.parameters())
    made.requires_grad_(False)
    for model in (made, real):
        reset(model)
    assert made.state_dict().keys() == real.state_dict().keys()
    for (key, mine), own in zip(made.named_parameters(), real.parameters(), strict=True):
        assert mine.device == own.device == resolve_device(None) and torch.equal(mine, own), key
        assert mine.__dict__ == own.__dict__ and not mine.requires_grad, key
    x = torch.randn(32, 1, 32, device=resolve_device(None))
    for autocast in (te.autocast(enabled=False), te.autocast(recipe=DelayedScaling())):
        with autocast:
            assert torch.equal(made(x), real(x))


def test_it_stays_on_the_meta_device_until_then() -> None:
    layer: Any = te.Linear(32, 32, device="meta")
    layer.reset_parameters(defer_init=True)
    again = copy.deepcopy(layer)
    assert layer.weight.is_meta and again.weight.is_meta
    again.reset_parameters()
    assert layer.weight.is_meta and not again.weight.is_meta


def test_parts_of_a_weight_lie_in_one_memory_again() -> None:
    layer: Any = te.Linear(32, 48, parameters_split=("q", "k", "v"), device="meta")
    layer.reset_parameters()
    for kind in ("weight", "bias"):
        parts = [getattr(layer, f"{part}_{kind}") for part in "qkv"]
        step = parts[0].numel() * parts[0].element_size()
        assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, step, 2 * step]


def test_memory_that_is_there_is_kept() -> None:
    layer: Any = te.LayerNormMLP(32, 32, device="cpu")
    before = {name: (id(p), p.data_ptr()) for name, p in layer.named_parameters()}
    layer.reset_parameters()
    assert {name: (id(p), p.data_ptr()) for name, p in layer.named_parameters()} == before
