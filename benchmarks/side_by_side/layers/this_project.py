# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`te_dispatch.pytorch`: under the policy in force, by default the machine's own backend first; the same layer as a
CUDA graph; and under the shipped ``triton-only``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import te_dispatch
import te_dispatch.pytorch as te
from side_by_side.layers import MODES, Contestant, Layer, Shape
from side_by_side.rivals import triton_backend
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.scopes import MANAGER

RECIPES: dict[str, Callable[[], Any]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


def _region(mode: str) -> Callable[[], Any]:
    if mode == "bf16":
        return contextlib.nullcontext
    recipe = RECIPES[mode]()
    return lambda: te.autocast(enabled=True, recipe=recipe)


def _in_mode(module: torch.nn.Module, mode: str) -> Layer:
    region = _region(mode)

    def run(x: torch.Tensor) -> torch.Tensor:
        with region():
            return module(x)

    return Layer(module, run)


def _layer(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    module = te.TransformerLayer(
        shape.hidden,
        shape.ffn,
        shape.heads,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        params_dtype=torch.bfloat16,
        device=device,
    )
    return _in_mode(module, mode)


def _compiled_layer(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    layer = _layer(shape, mode, device, dropout)
    return Layer(layer.module, torch.compile(layer.run, dynamic=False, fullgraph=True))


def _no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


def _graphed_layer(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    """The layer under `make_graphed_callables`; its sample looks as the input of a training step does."""
    layer = _layer(shape, mode, device, dropout)
    size = shape.sequence, shape.batch, shape.hidden
    sample = torch.zeros(size, dtype=torch.bfloat16, device=device, requires_grad=True)
    recipe = None if mode == "bf16" else RECIPES[mode]()
    te.make_graphed_callables(layer.module, (sample,), enabled=recipe is not None, recipe=recipe)
    return layer


def _in_triton(layer: Layer) -> Layer:
    # Read once: a step is timed, not a file.
    policy = load_policy("triton-only", MANAGER.known())

    def run(x: torch.Tensor) -> torch.Tensor:
        with te_dispatch.policy(policy):
            return layer.run(x)

    return Layer(layer.module, run)


def _triton_layer(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    return _in_triton(_layer(shape, mode, device, dropout))


def _triton_linear(features: int, mode: str, device: torch.device) -> Layer:
    return _in_triton(_linear(features, mode, device))


def _linear(features: int, mode: str, device: torch.device) -> Layer:
    return _in_mode(te.Linear(features, features, params_dtype=torch.bfloat16, device=device), mode)


CONTESTANTS = (
    Contestant("te_dispatch", MODES, lambda: None, _layer, _linear),
    Contestant("te_dispatch, graphed", MODES, _no_cuda, _graphed_layer),
    Contestant("te_dispatch, triton-only", MODES, triton_backend.missing, _triton_layer, _triton_linear),
    Contestant("te_dispatch, compiled", MODES, lambda: None, _compiled_layer, default=False),
)
