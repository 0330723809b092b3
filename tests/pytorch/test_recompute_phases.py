# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Checkpoints that are written by hand and declare their phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.pytorch.recompute.phases import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)


class ByHand(torch.autograd.Function):
    """A checkpoint as frameworks write them: the first forward without gradients, the recomputation in backward."""

    @staticmethod
    def forward(ctx: Any, module: torch.nn.Module, recipe: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.recipe = module, recipe
        ctx.save_for_backward(x)
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            return module(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with (
            torch.enable_grad(),
            te.autocast(recipe=ctx.recipe),
            activation_recompute_forward(activation_recompute=True, recompute_phase=True),
        ):
            y = ctx.module(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


def train(recipe: Any, declared: bool, microbatches: int) -> list[torch.Tensor]:
    """Gradients and scales of three steps; `microbatches` forwards come before the first backward of each."""
    torch.manual_seed(0)
    layer = te.LayerNormMLP(32, 64, device="cpu")
    seen = []
    for _ in range(3):
        inputs = [torch.randn(16, 32, requires_grad=True) * 3 for _ in range(microbatches)]
        outputs = []
        for x in inputs:
            x.retain_grad()
            with te.autocast(recipe=recipe):
                outputs.append(ByHand.apply(layer, recipe, x) if declared else layer(x))
        for y in outputs:
            y.square().sum().backward()
        seen += [*(y.detach() for y in outputs), *(x.grad for x in inputs)]
    return [*seen, *(p.grad for p in layer.parameters()), layer.get_extra_state()]  # type: ignore[list-item]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_a_declared_checkpoint_changes_no_bit(recipe: Any, microbatches: int) -> None:
    plain, recomputed = train(recipe, False, microbatches), train(recipe, True, microbatches)
    assert all(map(torch.equal, plain, recomputed))


def test_what_is_declared_can_be_asked_and_ends() -> None:
    def asked() -> tuple[bool, bool]:
        return is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()

    @activation_recompute_forward(activation_recompute=True, recompute_phase=True)
    def inside() -> tuple[bool, bool]:
        return asked()

    assert asked() == (False, False) and inside() == (False, True)  # enabled: in an autocast only
    with te.autocast(recipe=DelayedScaling()):
        assert inside() == (True, True)
        with activation_recompute_forward(activation_recompute=True):
            assert asked() == (True, False) and inside() == (True, True) and asked() == (True, False)
        with pytest.raises(ZeroDivisionError), activation_recompute_forward(activation_recompute=True):
            raise ZeroDivisionError
        assert asked() == (False, False)


def test_a_declared_checkpoint_in_another_one_leaves_later_steps_as_they_are() -> None:
    def train(declared: bool, outer: bool, use_reentrant: bool = True) -> list[torch.Tensor]:
        torch.manual_seed(0)
        recipe, layer, found = DelayedScaling(amax_history_len=1), te.LayerNormMLP(32, 64, device="cpu"), []

        def run(x: torch.Tensor) -> torch.Tensor:
            return ByHand.apply(layer, recipe, x) if declared else layer(x)

        for i in range(4):
            x = (torch.randn(16, 32) * (i + 1)).requires_grad_()
            with te.autocast(recipe=recipe):
                y = te.checkpoint(run, x, use_reentrant=use_reentrant) if outer and i == 1 else run(x)
            (y.square().sum() * (i + 1)).backward()
            found += [y.detach(), x.grad]
        return [*found, *(p.grad for p in layer.parameters()), layer.get_extra_state()]  # type: ignore[list-item]

    plain = train(False, False)
    for how in ((False,), (True, True), (True, False)):
        assert all(map(torch.equal, train(True, *how), plain)), how


def test_what_no_backward_follows_is_not_replayed() -> None:
    def train(evaluates: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        recipe, layer, found = DelayedScaling(amax_history_len=1), te.LayerNormMLP(32, 64, device="cpu"), []
        for i in range(4):
            x = (torch.randn(16, 32) * (i + 1)).requires_grad_()
            if evaluates:
                layer.eval()
                with torch.no_grad(), te.autocast(recipe=recipe):
                    ByHand.apply(layer, recipe, x.detach())
                layer.train()
            with te.autocast(recipe=recipe):
                y = ByHand.apply(layer, recipe, x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        return [*found, *(p.grad for p in layer.parameters()), layer.get_extra_state()]  # type: ignore[list-item]

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=3), Float8CurrentScaling()])
def test_contexts_for_a_checkpoint_of_torch_change_no_bit(recipe: Any) -> None:
    def trained(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = te.LayerNormMLP(32, 64, device="cpu")
        for _ in range(3):
            x = torch.randn(16, 32, requires_grad=True) * 3
            with te.autocast(recipe=recipe):
                if checkpointed:
                    options: Any = {"use_reentrant": False, "context_fn": get_activation_recompute_contexts}
                    y = torch.utils.checkpoint.checkpoint(layer, x, **options)
                else:
                    y = layer(x)
            y.square().sum().backward()
        return [*(p.grad for p in layer.parameters()), layer.get_extra_state()]  # type: ignore[list-item]

    for mine, plain in zip(trained(True), trained(False), strict=True):
        assert torch.equal(mine, plain)


def test_contexts_declare_their_phases() -> None:
    first, again = get_activation_recompute_contexts()
    with te.autocast(recipe=Float8CurrentScaling()):
        with first:
            assert is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
        with again:
            assert is_fp8_activation_recompute_enabled() and in_fp8_activation_recompute_phase()
    assert not is_fp8_activation_recompute_enabled()
