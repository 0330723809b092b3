# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's own modules with its own recipes, at their defaults."""

from __future__ import annotations

import torch

from side_by_side.layers import MODES, Contestant, Layer, Shape
from side_by_side.rivals.transformer_engine import missing


def _in_mode(module: torch.nn.Module, mode: str) -> Layer:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    if mode == "bf16":
        return Layer(module, module)
    recipe = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[mode]()

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return module(x)

    return Layer(module, run)


def _layer(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    import transformer_engine.pytorch as te

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


def _linear(features: int, mode: str, device: torch.device) -> Layer:
    import transformer_engine.pytorch as te

    return _in_mode(te.Linear(features, features, params_dtype=torch.bfloat16, device=device), mode)


CONTESTANTS = (Contestant("transformer_engine", MODES, missing, _layer, _linear),)
