# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a module returns may be written in place, as ``y = layer(x); y += residual`` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import Float8CurrentScaling

MODULES: dict[str, Any] = {
    "Linear": lambda: te.Linear(64, 64, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128, device="cpu"),
    "LayerNorm": lambda: te.LayerNorm(64, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(64, device="cpu"),
    "MultiheadAttention": lambda: te.MultiheadAttention(64, 2, attention_dropout=0.0, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(
        64, 128, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
}


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "quantized"])
@pytest.mark.parametrize("shape", [(16, 64), (16, 2, 64)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_result_may_be_written_in_place(name: str, shape: tuple[int, ...], recipe: Any) -> None:
    if len(shape) == 2 and name in ("MultiheadAttention", "TransformerLayer"):
        pytest.skip("takes three dimensions")
    torch.manual_seed(0)
    module = MODULES[name]()
    x, residual = torch.randn(shape), torch.randn(shape)

    def run(in_place: bool) -> list[torch.Tensor]:
        inp, beside = x.clone().requires_grad_(), residual.clone().requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(inp)
        if in_place:
            y += beside
        else:
            y = y + beside
        y.square().sum().backward()
        found = [y, inp.grad, beside.grad, *(parameter.grad for parameter in module.parameters())]
        return [tensor.detach().clone() for tensor in found if tensor is not None]

    expected = run(False)
    for _ in range(3):  # also from captured calls
        for a, b in zip(run(True), expected, strict=True):
            assert torch.equal(a, b)
