# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What torch.func can do with modules, and what it is told it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te

MODULES: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNorm": lambda: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"),
}
X = torch.randn(16, 1, 32)


@pytest.mark.parametrize("name", MODULES)
def test_transforms_say_that_they_are_not_supported(name: str) -> None:
    module = MODULES[name]()
    for transformed in (torch.func.grad(lambda x: module(x).sum()), torch.func.vjp):
        with pytest.raises(NotImplementedError, match=r"do not support the transforms of torch\.func .* use backward"):
            transformed(X) if transformed is not torch.func.vjp else transformed(module, X)


@pytest.mark.parametrize("name", MODULES)
def test_functional_call_gives_what_the_module_with_these_parameters_gives(name: str) -> None:
    module, other = MODULES[name](), MODULES[name]()
    parameters = {key: value.detach().clone().requires_grad_() for key, value in other.named_parameters()}
    out, expected = torch.func.functional_call(module, parameters, (X,)), other(X)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.square().sum(), list(parameters.values()))
    wanted = torch.autograd.grad(expected.square().sum(), list(other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
