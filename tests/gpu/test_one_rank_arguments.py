# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments that Megatron gives on one rank, with the kernels and the random states of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.pytorch.distributed.rng_tracker import DEFAULT_STATE, RngStatesTracker

HIDDEN, FFN, ROWS = 256, 512, 128
BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, FFN, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, FFN, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **kw),
}


def step(module: torch.nn.Module, recipe: Any, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(ROWS, HIDDEN, device="cuda", generator=generator).bfloat16()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(torch.randn(y.shape, device="cuda", generator=generator).bfloat16())


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()])
@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_of_bf16_weights_add_up_in_float32(name: str, recipe: Any, delay: bool) -> None:
    modules = []
    for arguments in ({}, {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay}):
        torch.manual_seed(0)
        modules.append(BUILDERS[name](params_dtype=torch.bfloat16, **arguments))
    plain, fused = modules
    weights = [n for n, _ in plain.named_parameters() if n.endswith("weight") and "norm" not in n]
    for which in weights:
        weight = fused.get_parameter(which)
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    sums = {which: torch.zeros(plain.get_parameter(which).shape, device="cuda") for which in weights}
    for seed in (1, 2, 3):
        step(plain, recipe, seed)
        step(fused, recipe, seed)
        fused.backward_dw()
        for which, total in sums.items():
            total += plain.get_parameter(which).grad.float()
        plain.zero_grad()
    for which, total in sums.items():
        found = fused.get_parameter(which)
        assert found.grad is None
        # Each of the three gradients was rounded to bf16 here, by half a unit in the last place.
        bound = 3 * 2.0**-8 * total.abs().max()
        assert bool(total.any()) and float((found.main_grad - total).abs().max()) <= float(bound), which


def test_the_tracker_draws_from_states_of_the_gpu() -> None:
    states = RngStatesTracker()
    states.add(DEFAULT_STATE, 7)
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    with states.fork():
        first = torch.rand(8, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with states.fork():
        second = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    assert torch.equal(torch.rand(8, device="cuda"), second)


def test_attention_drops_from_the_trackers_state() -> None:
    x = torch.randn(64, 2, 4, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for seed in (1, 2):
        states = RngStatesTracker()
        states.add(DEFAULT_STATE, 7)
        attention = te.DotProductAttention(
            4, 64, attention_dropout=0.5, get_rng_state_tracker=lambda states=states: states
        )
        torch.cuda.manual_seed(seed)
        results.append(attention(x, x, x))
    assert torch.equal(*results)
