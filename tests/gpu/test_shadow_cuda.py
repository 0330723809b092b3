# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Shadow mode on a GPU: every call of a layer's training is compared with the reference, and none is called wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_under_shadow_raises_no_alarm(name: str, tmp_path: Path) -> None:
    policy = tmp_path / "shadow.yaml"
    shadow = f"{{against: reference, fraction: 1.0, on_mismatch: raise, directory: {tmp_path}}}"
    policy.write_text(f"version: 1\nshadow: {shadow}\n")
    torch.manual_seed(0)
    layer = te.TransformerLayer(256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16)
    with te_dispatch.policy(policy):
        for _ in range(2):
            x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                y = layer(x)
            y.float().square().mean().backward()
    torch.cuda.synchronize()
    report = te_dispatch.shadow_report()
    assert sum(row.compared for row in report) > 0 and not any(row.mismatched for row in report)
