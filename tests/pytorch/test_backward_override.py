# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Backward passes in high precision after quantized forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

IN, OUT, ROWS = 64, 96, 64
RECIPES: dict[str, Any] = {
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": lambda **kw: NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, **kw),
}
BUILDERS = {
    "Linear": lambda **kw: te.Linear(IN, OUT, device="cpu", **kw),
    "Linear, divided": lambda **kw: te.Linear(IN, OUT, parameters_split=("a", "b"), device="cpu", **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(IN, OUT, device="cpu", **kw),
}


def built(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name](params_dtype=dtype, **kwargs)


def data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, IN, dtype=dtype), torch.randn(ROWS, OUT, dtype=dtype)


def run(module: torch.nn.Module, recipe: Recipe | None, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_high_precision_gradients_are_those_of_a_module_without_casts(
    recipe: str, name: str, dtype: torch.dtype
) -> None:
    module, (x, dy) = built(name, dtype), data(dtype)
    plain = run(module, None, x, dy)
    quantized = run(module, RECIPES[recipe](), x, dy)
    for _ in range(3):  # the later ones would be known calls
        overridden = run(module, RECIPES[recipe](backward_override="high_precision"), x, dy)
        assert torch.equal(overridden[0], quantized[0]) and not torch.equal(overridden[0], plain[0])
        assert all(map(torch.equal, overridden[1:], plain[1:]))
    assert not torch.equal(quantized[1], plain[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_gradients_are_those_of_the_quantized_values(recipe: str, dtype: torch.dtype) -> None:
    module, (x, dy) = built("Linear", dtype), data(dtype)
    overridden = run(module, RECIPES[recipe](backward_override="dequantized"), x, dy)
    assert torch.equal(overridden[0], run(module, RECIPES[recipe](), x, dy)[0])
    casts = module.fp8_state.plan.gemms[0]  # type: ignore[union-attr]
    values = built("Linear", dtype)
    with torch.no_grad():
        weight = ops.dequantize(ops.quantize(module.weight.detach(), casts.weight, usage="row"), dtype=dtype)
        values.weight.copy_(weight)
    seen = ops.dequantize(ops.quantize(x, casts.input, usage="row"), dtype=dtype)
    assert not torch.equal(seen, x) and not torch.equal(weight, module.weight)
    assert all(map(torch.equal, overridden[1:], run(values, None, seen, dy)[1:]))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", BUILDERS)
def test_with_what_else_a_call_may_ask_for(name: str, override: str) -> None:
    recipe, (x, dy) = Float8CurrentScaling(backward_override=override), data()
    wanted = run(built(name), recipe, x, dy)
    fused = built(name, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    weights = [p for n, p in fused.named_parameters() if n.endswith("weight") and "norm" not in n]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    run_fused = run(fused, recipe, x, dy)
    fused.backward_dw()
    assert torch.equal(run_fused[1], wanted[1])
    for (which, parameter), grad in zip(fused.named_parameters(), wanted[2:]):
        found = parameter.main_grad if any(parameter is weight for weight in weights) else parameter.grad
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-5, msg=which)
    cached, leaf = built(name), x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        for first in (True, False):
            leaf.grad = None
            cached.zero_grad()
            y = te.checkpoint(cached, leaf, is_first_microbatch=first)
            y.backward(dy)
    assert all(map(torch.equal, [y.detach(), leaf.grad, *(p.grad for p in cached.parameters())], wanted))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_quantized_input_and_a_quantized_gradient(override: str) -> None:
    recipe, (x, dy) = Float8CurrentScaling(backward_override=override), data()
    layer, leaf = built("Linear"), x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        first = te.Linear(IN, IN, device="cpu")
        given = first(leaf, fp8_output=True)
        assert isinstance(given, QuantizedTensor)
        y = layer(given, fp8_grad=True)
    y.backward(dy)
    assert leaf.grad is not None and bool(leaf.grad.any())
    values = given.dequantize().detach()
    found = layer.weight.grad
    assert torch.equal(found, run(layer, None, values, dy)[2])  # its values are all that there is of it


@pytest.mark.slow
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", BUILDERS)
def test_it_compiles(name: str, override: str) -> None:
    recipe, (x, dy) = Float8CurrentScaling(backward_override=override), data()
    eager = run(built(name), recipe, x, dy)
    module = built(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = compiled(leaf)
    y.backward(dy)
    assert all(map(torch.equal, [y.detach(), leaf.grad, *(p.grad for p in module.parameters())], eager))


def test_a_module_that_has_none_says_so() -> None:
    x, _ = data()
    with (
        te.autocast(recipe=Float8CurrentScaling(backward_override="dequantized")),
        pytest.raises(NotImplementedError, match="LayerNormMLP: backward_override='dequantized' is not supported"),
    ):
        te.LayerNormMLP(IN, OUT, device="cpu")(x)
