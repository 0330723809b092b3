# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Training one transformer layer on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import Recipe


def losses(recipe: Callable[[], Recipe], **how: Any) -> list[float]:
    """The losses of 30 steps towards random targets. Each step runs under ``recipe()``; `how` is the layer's."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        256, 1024, 8, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, **how
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3)
    x = torch.randn(128, 4, 256, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    found = []
    for _ in range(30):
        with te.autocast(enabled=True, recipe=recipe()):
            y = layer(x, attention_mask=None)
        loss = (y.float() - target.float()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
