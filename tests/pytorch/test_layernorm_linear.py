# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`LayerNormLinear`: the composition of a norm and a linear layer, in one Function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling

from .bounds import Bounded, BoundedNorm, assert_bounded, assert_same_sum
from .gemm_oracle import RECIPES, assert_within, frozen, product_bound, seen_by_gemm


def _layer(**kwargs: Any) -> te.LayerNormLinear:
    torch.manual_seed(0)
    layer = te.LayerNormLinear(64, 96, device="cpu", **kwargs)
    with torch.no_grad():
        for parameter in (layer.layer_norm_weight, layer.layer_norm_bias, getattr(layer, "bias", None)):
            if parameter is not None:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def _norm(layer: te.LayerNormLinear, x: torch.Tensor) -> torch.Tensor:
    """The norm written out, differentiable, in x's dtype."""
    gamma = layer.layer_norm_weight.to(x.dtype) + (1 if layer.zero_centered_gamma else 0)
    if layer.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * gamma
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + layer.eps).sqrt()
    return scaled * gamma + layer.layer_norm_bias.to(x.dtype)


def _bounded_norm(layer: te.LayerNormLinear, x: torch.Tensor) -> BoundedNorm:
    parameters = layer.layer_norm_weight, layer.layer_norm_bias
    return BoundedNorm(x.detach().reshape(-1, 64), *parameters, layer.eps, layer.zero_centered_gamma)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_float32_against_float64_autograd(normalization: str, zero_centered: bool, returned: bool) -> None:
    layer = _layer(normalization=normalization, zero_centered_gamma=zero_centered, return_layernorm_output=returned)
    x = (torch.randn(3, 7, 64) * 2 + 1).requires_grad_()
    exact = x.detach().double().requires_grad_()
    wide = copy.deepcopy(layer).double()
    normed = _norm(wide, exact)
    expected = normed @ wide.weight.T + wide.bias
    result = layer(x)
    out = result[0] if returned else result
    norm, weight = _bounded_norm(layer, x), Bounded(layer.weight)
    assert_bounded(out, expected, norm.y @ weight.T + Bounded(layer.bias), "out")
    dy, dn = torch.randn_like(out), torch.randn(3, 7, 64)
    loss, exact_loss = (out * dy).sum(), (expected * dy).sum()
    rows = Bounded(dy.reshape(-1, 96))
    normed_grad = rows @ weight
    if returned:
        assert_bounded(result[1], normed, norm.y, "norm")
        loss, exact_loss = loss + (result[1] * dn).sum(), exact_loss + (normed * dn).sum()
        normed_grad = normed_grad + Bounded(dn.reshape(-1, 64))
    dx, dgamma, dbeta = norm.backward(normed_grad)
    bounded = {"layer_norm_weight": dgamma, "layer_norm_bias": dbeta, "weight": rows.T @ norm.y, "bias": rows.sum(0)}
    parameters = dict(layer.named_parameters())
    got = torch.autograd.grad(loss, [x, *parameters.values()])
    want = torch.autograd.grad(exact_loss, [exact, *wide.parameters()])
    for name, a, b in zip(["x", *parameters], got, want):
        assert_bounded(a, b, dx if name == "x" else bounded[name], name)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_against_float64_of_the_same_operands(name: str, normalization: str) -> None:
    layer = _layer(normalization=normalization, return_layernorm_output=True)
    recipe = RECIPES[name]
    for _ in range(2):
        x = torch.randn(32, 64).requires_grad_()
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            with torch.no_grad():
                layer(x)
            casts = layer.fp8_state.plan.gemms[0]
            q_x, q_w, q_g = (frozen(q) for q in (casts.input, casts.weight, casts.grad))
            y, normed = layer(x)
        dy = torch.randn(y.shape)
        y.backward(dy)
        a, b = seen_by_gemm(normed, q_x, casts.fprop[0][0]), seen_by_gemm(layer.weight, q_w, casts.fprop[1][0])
        shift = layer.bias.detach().double()
        bound = product_bound(a, b.T, y.dtype) + 2.0**-23 * shift.abs()
        assert_within(y, a @ b.T + shift, bound)
        g, a = seen_by_gemm(dy, q_g, casts.wgrad[0][0]), seen_by_gemm(normed, q_x, casts.wgrad[1][0])
        assert_within(layer.weight.grad, g.T @ a, product_bound(g.T, a, y.dtype))
        # The gradient of the norm's output, then through the norm written out in float64.
        g, b = seen_by_gemm(dy, q_g, casts.dgrad[0][0]), seen_by_gemm(layer.weight, q_w, casts.dgrad[1][0])
        exact = x.detach().double().requires_grad_()
        wide = copy.deepcopy(layer).double()
        dx, dgamma = torch.autograd.grad(_norm(wide, exact), [exact, wide.layer_norm_weight], g @ b)
        norm_grads = _bounded_norm(layer, x).backward(Bounded(g @ b, product_bound(g, b, y.dtype)))
        assert_bounded(x.grad, dx, norm_grads[0], "x")
        assert_bounded(layer.layer_norm_weight.grad, dgamma, norm_grads[1], "layer_norm_weight")


@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_results_come_as_asked(recipe: Any) -> None:
    x = torch.randn(16, 64)
    for return_bias in (False, True):
        for returned in (False, True):
            layer = _layer(return_bias=return_bias, return_layernorm_output=returned)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                result = layer(x)
            assert isinstance(result, tuple) == (return_bias or returned)
            results = result if isinstance(result, tuple) else (result,)
            assert len(results) == 1 + return_bias + returned
            assert results[0].shape == (16, 96)
            if return_bias:
                assert torch.equal(results[1], layer.bias)
            if returned:
                assert_bounded(results[-1], _norm(copy.deepcopy(layer).double(), x.double()), _bounded_norm(layer, x).y)


@pytest.mark.parametrize("shape", [(0, 64), (64,)])
def test_no_rows_and_one_row(shape: tuple[int, ...]) -> None:
    layer = _layer()
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert tuple(y.shape) == (*shape[:-1], 96)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.eq(0).all() == (shape[0] == 0)


def test_gradients_only_where_wanted() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(16, 64), torch.randn(16, 96)

    def run(wanted: set[str], input_grad: bool) -> dict[str, Any]:
        layer = _layer()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in wanted)
        inp = x.clone().requires_grad_(input_grad)
        with te.autocast(recipe=DelayedScaling()):
            layer(inp).backward(dy)
        return {"inp": inp.grad, **{n: p.grad for n, p in layer.named_parameters()}}

    names = {n for n, _ in _layer().named_parameters()}
    everything = run(names, True)
    for wanted, input_grad in (({"weight"}, False), ({"layer_norm_weight"}, False), (set(), True), ({"bias"}, False)):
        for name, value in run(wanted, input_grad).items():
            if name in wanted or (name == "inp" and input_grad):
                if name == "bias":  # by itself it is summed in another order
                    assert_same_sum(value, everything[name], dy)
                else:
                    assert torch.equal(value, everything[name]), name
            else:
                assert value is None, name


def test_parameters_start_as_documented() -> None:
    layer = te.LayerNormLinear(16, 16, device="cpu")
    assert layer.layer_norm_weight.eq(1).all() and layer.layer_norm_bias.eq(0).all()
    centered = te.LayerNormLinear(16, 16, normalization="RMSNorm", zero_centered_gamma=True, device="cpu")
    assert centered.layer_norm_weight.eq(0).all() and centered.layer_norm_bias is None


@pytest.mark.parametrize("name", ["ub_bulk_wgrad", "ub_bulk_dgrad"])
def test_unsupported_arguments_name_themselves(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"LayerNormLinear: {name}=True"):
        te.LayerNormLinear(16, 16, device="cpu", **{name: True})


def test_unknown_normalization_lists_the_known() -> None:
    with pytest.raises(ValueError, match="normalization must be one of 'LayerNorm', 'RMSNorm', got 'BatchNorm'"):
        te.LayerNormLinear(16, 16, device="cpu", normalization="BatchNorm")
