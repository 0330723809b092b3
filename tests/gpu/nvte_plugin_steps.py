# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Training steps of an installed Transformer Engine's layer: a program for test_nvte_plugin_native.py.

    python tests/gpu/nvte_plugin_steps.py RECIPE      # "none", or a recipe of transformer_engine.common.recipe

It prints one line of JSON: the losses, and with NVTE_PLUGIN set which functions are te_dispatch's and what they served.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

STEPS, SEQUENCE, BATCH, HIDDEN, HEADS = 4, 128, 4, 512, 8


def main(name: str) -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        HIDDEN, 4 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
        normalization="RMSNorm", activation="swiglu", bias=False, fuse_qkv_params=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    x, target = (torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    recipe = None if name == "none" else getattr(recipes, name)()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        loss = (y.float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = {"losses": losses}
    if "NVTE_PLUGIN" in os.environ:
        from te_dispatch.compat import nvte_plugin

        result["functions"] = sorted(nvte_plugin.verify()["functions"])
        result["calls"] = nvte_plugin.calls()
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
