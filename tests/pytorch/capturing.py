# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules whose calls are captured, and steps that tell whether they do what others would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_dispatch.core import scopes
from te_dispatch.pytorch.capture.signatures import CapturedCalls
from te_dispatch.pytorch.modules.gemm_module import GemmModule

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "most_recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=2),
    "by_callable": DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.amax(0)),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(64, 96, device="cpu"),
    "Linear without bias": lambda: te.Linear(64, 96, device="cpu", bias=False),
    "Linear of three": lambda: te.Linear(64, 96, device="cpu", parameters_split=("q", "k", "v")),
    "Linear returning its bias": lambda: te.Linear(64, 96, device="cpu", return_bias=True),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96, device="cpu"),
    "LayerNormLinear, RMS": lambda: te.LayerNormLinear(64, 96, device="cpu", normalization="RMSNorm"),
    "LayerNormLinear returning its norm": lambda: te.LayerNormLinear(
        64, 96, device="cpu", return_layernorm_output=True
    ),
    "LayerNormLinear passing its input": lambda: passing(
        te.LayerNormLinear(64, 96, device="cpu", normalization="RMSNorm")
    ),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(
        64, 64, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0, layer_number=1
    ),
    "TransformerLayer, grouped queries": lambda: te.TransformerLayer(
        64,
        64,
        4,
        num_gqa_groups=2,
        normalization="RMSNorm",
        bias=False,
        qkv_weight_interleaved=False,
        device="cpu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
}


def passing(module: te.LayerNormLinear) -> te.LayerNormLinear:
    module.passes_input = True
    return module


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    module = MODULES[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def step(module: torch.nn.Module, recipe: Any, seed: int, trains_x: bool = True) -> list[torch.Tensor]:
    """Everything that a training step gives, with an input and a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 1, 64, generator=generator).requires_grad_(trains_x)
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = module(x)
    results = [out] if isinstance(out, torch.Tensor) else [part for part in out if part is not None]
    grads = [torch.randn(part.shape, generator=generator) for part in results]
    torch.autograd.backward(results, grads)
    return [*results, *([x.grad] if trains_x else []), *(p.grad for p in module.parameters())]


def state_of(module: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for part in module.modules():
        if isinstance(part, GemmModule):
            for scales in part.fp8_state.scales.live().values():
                found += [scales.history, scales.scale, scales.scale_amax]
    return found


def without_capture(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(CapturedCalls, "capture", lambda *args: None)
    return monkeypatch


def captured(module: torch.nn.Module) -> bool:
    """Whether a backward's steps are known, too."""
    return any(
        known.options.program is not None and bool(known.options.program.backwards)
        for part in module.modules()
        if isinstance(part, GemmModule)
        for known in part.captured_calls.signatures
    )


RECIPE = RECIPES["delayed"]


def trained() -> te.Linear:
    """A Linear whose call with a (32, 1, 64) is captured."""
    module = made("Linear")
    for seed in range(2):
        step(module, RECIPE, seed)
    assert captured(module)
    return module


def operators(call: Callable[[], Any]) -> list[str]:
    calls: list[str] = []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(operator.name)):
        call()
    return calls
