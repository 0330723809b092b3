# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm modules against torch.nn in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.modules.normalization import L2Normalization, LayerNorm, RMSNorm

from .bounds import BoundedNorm, assert_bounded

N = 48


def bound(dtype: torch.dtype, wanted: torch.Tensor, terms: int) -> float:
    """float32 arithmetic: mean, variance, two products and a gradient's sum, n u each (Higham, 3.1); one rounding."""
    low = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return (8 * terms * 2.0**-24 + low) * max(1.0, float(wanted.detach().abs().max()))


def reference(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float) -> torch.Tensor:
    if kind == "LayerNorm":
        return torch.nn.functional.layer_norm(x, w.shape, w, b, eps)
    dims = tuple(range(-w.dim(), 0))
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps) * w


@pytest.mark.parametrize("shape", [(N,), (6, 8)])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_against_torch(kind: str, dtype: torch.dtype, centered: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cls = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind]
    module = cls(shape, eps=1e-3, params_dtype=dtype, zero_centered_gamma=centered)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, *shape).to(dtype).requires_grad_()
    dy = torch.randn(3, 5, *shape).to(dtype)
    y = module(x)
    y.backward(dy)

    exact_x = x.detach().double().requires_grad_()
    exact = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    factor = exact["weight"] + 1.0 if centered else exact["weight"]
    wanted = reference(kind, exact_x, factor, exact.get("bias"), 1e-3)
    wanted.backward(dy.double())
    assert y.dtype == x.grad.dtype == dtype and y.shape == x.shape
    assert (y.double() - wanted).abs().max() <= bound(dtype, wanted, N)
    assert (x.grad.double() - exact_x.grad).abs().max() <= bound(dtype, exact_x.grad, N)
    for name, parameter in module.named_parameters():
        error = (parameter.grad.double() - exact[name].grad).abs().max()
        assert error <= bound(dtype, exact[name].grad, 15), name


def test_fresh_norms_only_normalize() -> None:
    x = torch.randn(4, N)
    for centered in (False, True):
        gamma = torch.full((N,), 0.0 if centered else 1.0)
        layer, rms = LayerNorm(N, zero_centered_gamma=centered)(x), RMSNorm(N, zero_centered_gamma=centered)(x)
        wanted = torch.nn.functional.layer_norm(x.double(), (N,))
        assert_bounded(layer, wanted, BoundedNorm(x, gamma, torch.zeros(N), 1e-5, centered).y)
        wanted = reference("", x.double(), torch.ones(N, dtype=torch.float64), None, 1e-5)
        assert_bounded(rms, wanted, BoundedNorm(x, gamma, None, 1e-5, centered).y)
    assert not LayerNorm(4, zero_centered_gamma=True).weight.any()


def test_l2_normalization() -> None:
    x = torch.randn(3, 7, dtype=torch.float32).requires_grad_()
    y = L2Normalization(1e-2)(x)
    exact = x.detach().double().requires_grad_()
    wanted = exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-2)
    y.sum().backward()
    wanted.sum().backward()
    assert (y.double() - wanted).abs().max() <= bound(torch.float32, wanted, 7)
    assert (x.grad.double() - exact.grad).abs().max() <= bound(torch.float32, exact.grad, 7)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("given, parameters", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16),
])  # fmt: skip
def test_the_result_has_the_dtype_of_the_parameters(norm: type, given: torch.dtype, parameters: torch.dtype) -> None:
    module = norm(N, params_dtype=parameters)
    x = torch.randn(2, N, dtype=given, requires_grad=True)
    y = module(input=x)
    assert y.dtype == parameters
    assert torch.equal(y, module(x.detach().to(parameters)))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == given


def test_torch_autocast() -> None:
    module = RMSNorm(N)
    x = torch.randn(2, N, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and module.weight.grad.dtype == torch.float32


def test_strides_and_empty_batches() -> None:
    module = LayerNorm(N)
    x = torch.randn(5, N, 2).transpose(1, 2)
    assert torch.equal(module(x), module(x.contiguous()))
    empty = torch.zeros(0, N, requires_grad=True)
    module(empty).sum().backward()
    assert empty.grad.shape == (0, N) and float(module.weight.grad.abs().sum()) == 0.0


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_backward_runs_under_its_forwards_policy(backend: str) -> None:
    seen: list[tuple[str, str]] = []
    x = torch.randn(2, N, requires_grad=True)
    with scopes.observe(lambda operator, accepted, args, result: seen.append((operator.name, accepted.id))):
        with scopes.using(norm=backend):
            y = LayerNorm(N)(x)
        y.sum().backward()
    assert [name for name, _ in seen] == ["layernorm_fwd", "layernorm_bwd"]
    assert {implementation.split(".")[0] for _, implementation in seen} == {backend}


def test_older_names() -> None:
    module = LayerNorm(hidden_size=N, dtype=torch.bfloat16, device="cpu", sm_margin=0)
    assert module.weight.dtype == module.bias.dtype == torch.bfloat16
    torch.nn.init.zeros_(module.weight)
    module.reset_layer_norm_parameters()
    assert torch.equal(module.weight, torch.ones(N, dtype=torch.bfloat16))
    rms = RMSNorm(hidden_size=N)
    torch.nn.init.zeros_(rms.weight)
    rms.reset_rms_norm_parameters()
    assert torch.equal(rms.weight, torch.ones(N))


def test_state_dict_fits_torch() -> None:
    theirs = torch.nn.LayerNorm(N)
    torch.nn.init.normal_(theirs.weight)
    ours = LayerNorm(N)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, N)
    bounded = BoundedNorm(x, ours.weight, ours.bias, ours.eps).y
    assert bounded.holds(ours(x)) and bounded.holds(theirs(x))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({}, ValueError, "normalized_shape must be"),
        ({"normalized_shape": 4, "hidden_size": 4}, ValueError, "not both"),
        ({"normalized_shape": ()}, ValueError, "normalized_shape must hold positive"),
        ({"normalized_shape": 4, "dtype": torch.half, "params_dtype": torch.float}, ValueError, "contradicts"),
        ({"normalized_shape": 4, "devise": "cpu"}, TypeError, "'devise'"),
        ({"normalized_shape": 4, "sm_margin": 2}, NotImplementedError, "sm_margin"),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    for cls in (LayerNorm, RMSNorm):
        with pytest.raises(error, match=message):
            cls(**arguments)


def test_call_errors() -> None:
    with pytest.raises(ValueError, match=r"must end in the dimensions \(48,\), got shape \(2, 47\)"):
        LayerNorm(N)(torch.zeros(2, 47))
    with pytest.raises(ValueError, match="input is on meta"):
        RMSNorm(N)(torch.zeros(2, N, device="meta"))
