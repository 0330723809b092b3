# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Gradients of weights that are added to ``weight.main_grad``, or computed by `backward_dw`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.pytorch.modules.main_grads import get_dummy_wgrad

HIDDEN, FFN, ROWS = 64, 128, 32

BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, FFN, device="cpu", **kw),
    "Linear, divided": lambda **kw: te.Linear(HIDDEN, FFN, parameters_split=("a", "b"), device="cpu", **kw),
    "Linear, no bias": lambda **kw: te.Linear(HIDDEN, FFN, bias=False, device="cpu", **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, FFN, device="cpu", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", device="cpu", **kw),
    "LayerNormMLP, recomputed": lambda **kw: te.LayerNormMLP(HIDDEN, FFN, checkpoint=True, device="cpu", **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **kw
    ),
}
RECIPES = {"none": None, "delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}


def weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if n.endswith("weight") and "norm_weight" not in n}


def built(name: str, dtype: torch.dtype, **kwargs: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name](params_dtype=dtype, **kwargs)


def step(module: torch.nn.Module, recipe: Any, seed: int, **call: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    dtype = next(module.parameters()).dtype
    x = torch.randn(8, ROWS // 8, HIDDEN, dtype=dtype, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **call)
    y.backward(torch.randn(y.shape, dtype=dtype))
    assert x.grad is not None
    return x.grad


def rounding(total: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """How far sums of `steps` gradients may be apart that are rounded to `dtype` one by one, or only as sums."""
    return 2 * steps * torch.finfo(dtype).eps * total.abs().max() + torch.zeros_like(total)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", BUILDERS)
def test_two_microbatches_add_up_as_autograd_adds_them(name: str, recipe: str) -> None:
    # In float32 a gradient is rounded once here and there, so that the sums are the same but for the last bit.
    made = None if RECIPES[recipe] is None else RECIPES[recipe]()
    plain, fused = built(name, torch.float32), built(name, torch.float32, fuse_wgrad_accumulation=True)
    for weight in weights(fused).values():
        weight.main_grad = torch.zeros(weight.shape)
    for seed in (1, 2, 3):
        assert torch.equal(step(plain, made, seed), step(fused, made, seed))
    for (which, wanted), found in zip(weights(plain).items(), weights(fused).values()):
        assert found.grad is None, which
        assert wanted.grad is not None and bool(wanted.grad.any())
        assert bool(((found.main_grad - wanted.grad).abs() <= rounding(wanted.grad, 3, torch.float32)).all()), which
    others = [(n, p.grad) for n, p in plain.named_parameters() if n not in weights(plain)]
    for which, grad in others:
        assert grad is not None and torch.equal(grad, dict(fused.named_parameters())[which].grad), which  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_bf16_parameters_are_rounded_to_the_buffer_once(recipe: str, buffer: torch.dtype) -> None:
    made = None if RECIPES[recipe] is None else RECIPES[recipe]()
    fused, exact = (built("Linear", torch.bfloat16, fuse_wgrad_accumulation=True) for _ in range(2))
    fused.weight.main_grad = torch.zeros(fused.weight.shape, dtype=buffer)
    exact.weight.main_grad = torch.zeros(exact.weight.shape)
    for module in (fused, exact):
        step(module, made, 1)
    assert torch.equal(fused.weight.main_grad, exact.weight.main_grad.to(buffer))
    assert fused.bias.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["Linear", "Linear, divided", "LayerNormMLP"])
def test_what_overwrites_the_buffer(name: str) -> None:
    wanted = built(name, torch.float32)
    step(wanted, None, 1)
    for how in ("first microbatch", "attribute", "neither"):
        fused = built(name, torch.float32, fuse_wgrad_accumulation=True)
        for weight in weights(fused).values():
            weight.main_grad = torch.full(weight.shape, 5.0)
            if how == "attribute":
                weight.overwrite_main_grad = True
        step(fused, None, 1, is_first_microbatch=True if how == "first microbatch" else None)
        for found, grad in zip(weights(fused).values(), (p.grad for p in weights(wanted).values())):
            before = 5.0 if how == "neither" else 0.0
            torch.testing.assert_close(found.main_grad, before + grad, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", ["Linear", "Linear, divided", "LayerNormLinear", "LayerNormMLP"])
def test_hooks_run_where_the_weight_notes_that_its_gradient_was_added(name: str) -> None:
    fused, ran = built(name, torch.float32, fuse_wgrad_accumulation=True), []
    for which, weight in weights(fused).items():
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda p, which=which: ran.append(which))
    step(fused, Float8CurrentScaling(), 1)
    assert sorted(ran) == sorted(weights(fused))
    for weight in weights(fused).values():
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is not None and not weight.grad.any() and bool(weight.main_grad.any())


def test_a_frozen_weight_needs_no_buffer() -> None:
    fused = built("LayerNormMLP", torch.float32, fuse_wgrad_accumulation=True)
    fused.fc1_weight.requires_grad_(False)
    fused.fc2_weight.main_grad = torch.zeros(fused.fc2_weight.shape)
    step(fused, None, 1)
    assert fused.fc1_weight.grad is None and bool(fused.fc2_weight.main_grad.any())


def test_setting_it_later_counts_from_the_next_call_on() -> None:
    layer = built("Linear", torch.float32)
    for seed in range(3):
        step(layer, DelayedScaling(), seed)
    layer.zero_grad()
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    step(layer, DelayedScaling(), 4)
    assert layer.weight.grad is None and bool(layer.weight.main_grad.any())
    layer.fuse_wgrad_accumulation = False
    step(layer, DelayedScaling(), 5)
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("buffer", "error", "words"),
    [
        (None, RuntimeError, r"Linear: fuse_wgrad_accumulation=True needs weight\.main_grad, a tensor"),
        (torch.zeros(3, 4), ValueError, r"weight\.main_grad of shape \(128, 64\) on cpu .* got \(3, 4\) on cpu"),
        (torch.zeros(FFN, HIDDEN, dtype=torch.float64), ValueError, "in float32, bfloat16 or float16, .*float64"),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(buffer: Any, error: type[Exception], words: str) -> None:
    layer = built("Linear", torch.float32, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = buffer
    with pytest.raises(error, match=words):
        step(layer, None, 1)
    assert buffer is None or not buffer.any()


@pytest.mark.parametrize("argument", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_both_are_refused_in_a_compiled_region(argument: str) -> None:
    layer = built("Linear", torch.float32, **{argument: True})
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{argument}=True is not supported in a compiled region"):
        compiled(torch.randn(ROWS, HIDDEN))


POSTPONED = [name for name in BUILDERS if name != "TransformerLayer"]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", POSTPONED)
def test_postponed_gradients_are_those_of_the_backward(name: str, recipe: str, fuse: bool) -> None:
    made = None if RECIPES[recipe] is None else RECIPES[recipe]()
    plain, postponed = (
        built(name, torch.float32, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay) for delay in (False, True)
    )
    assert (plain.need_backward_dw(), postponed.need_backward_dw()) == (False, True)
    for module in (plain, postponed):
        for weight in weights(module).values():
            weight.main_grad = torch.zeros(weight.shape)
            assert getattr(weight, "skip_backward_post_hook", False) is module.need_backward_dw()
    ran: list[int] = []
    postponed.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(len(ran)))
    for seed in (1, 2):
        assert torch.equal(step(plain, made, seed), step(postponed, made, seed))
    for weight in weights(postponed).values():
        assert weight.grad is None and not weight.main_grad.any()
    for done in range(2):  # a call for each backward pass, the oldest first
        assert ran == list(range(done))
        postponed.backward_dw()
    plain.backward_dw()
    assert ran == [0, 1]
    for (which, wanted), found in zip(weights(plain).items(), weights(postponed).values()):
        assert torch.equal(found.main_grad, wanted.main_grad), which
        assert (found.grad is None) is (wanted.grad is None) is fuse
        assert fuse or torch.equal(found.grad, wanted.grad), which
    for (which, wanted), found in zip(plain.named_parameters(), postponed.parameters()):
        if which not in weights(plain):
            if which.endswith("bias") and "norm" not in which:  # by itself it is summed in another order
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(found.grad, wanted.grad), which
    with pytest.raises(RuntimeError, match="no backward pass has left gradients"):
        postponed.backward_dw()


def test_postponed_products_run_under_the_policy_of_their_backward() -> None:
    layer = built("Linear", torch.float32, delay_wgrad_compute=True)
    seen: list[tuple[str, str]] = []
    with (
        te_dispatch.using(gemm="reference"),
        te_dispatch.observe(lambda operator, accepted, args, result: seen.append((operator.name, accepted.id))),
    ):
        step(layer, None, 1)
    assert {name for name, _ in seen} == {"gemm"}
    seen.clear()
    layer.backward_dw()
    assert seen == [("gemm", "reference.gemm")]


def test_the_gradient_in_place_of_one_is_shared_and_zeroed_on_demand() -> None:
    first = get_dummy_wgrad([3, 5], torch.bfloat16)
    assert first.shape == (3, 5) and first.dtype == torch.bfloat16 and not first.requires_grad
    first.fill_(2)
    assert get_dummy_wgrad((3, 5), torch.bfloat16).data_ptr() == first.data_ptr()
    assert get_dummy_wgrad([3, 5], torch.float32).data_ptr() != first.data_ptr()
    assert first.eq(2).all()
    assert get_dummy_wgrad([3, 5], torch.bfloat16, zero=True).eq(0).all()
