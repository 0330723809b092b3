# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Trains on the device of `examples/npu_backend`, in an environment that has it, and prints what ran as JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling

served: list[tuple[str, str, bool]] = []
main = threading.get_ident()


def step(layer: torch.nn.Module, x: torch.Tensor, recipe: DelayedScaling | None) -> torch.Tensor:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.square().sum().backward()
    return y.detach()


def build(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return te.LayerNormLinear(32, 48, normalization="RMSNorm").to(device)


x = torch.randn(16, 32)
ours, theirs = build("npu"), build("cpu")


def note(operator: Any, accepted: Any, args: Any, result: Any) -> None:
    served.append((operator.name, accepted.id, threading.get_ident() == main))


with te_dispatch.observe(note):
    y = step(ours, x.to("npu"), None)
    step(build("npu"), x.to("npu:0"), DelayedScaling())
want = step(theirs, x, None)
with torch.autocast("npu", dtype=torch.bfloat16):
    low = ours(x.to("npu"))
compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(x.to("npu"))
pairs = [(y, want), *((a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))]
json.dump(
    {
        "served": served,
        "error": max(float((a.cpu() - b).abs().max() / b.abs().max()) for a, b in pairs),
        "autocast": str(low.dtype),
        "compiled": torch.equal(compiled.cpu(), y.cpu()),
        "devices": sorted({str(a.device) for a, _ in pairs}),
    },
    sys.stdout,
)
