# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A script for the environments: real calls on the CPU. Prints what ran, a checksum of results, and what is known.

Arguments: names of parts to run, of `PARTS`; all but ``layer`` when there are none.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.core.scopes import MANAGER
from te_dispatch.numerics.quantizers import CurrentQuantizer


def primitives() -> list[torch.Tensor]:
    """Each operator once, called directly."""
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    a, b = (ops.quantize(t, CurrentQuantizer("e4m3fn"), usage="row") for t in (x, weight))
    return [
        a.row_data,
        ops.gemm(x, weight, layout="NT").out,
        ops.gemm(a, b, layout="NT", epilogue="gelu").out,
        ops.layernorm_fwd(x, torch.ones(64), None).y,
        ops.activation_fwd(x, kind="silu").out,
        ops.softmax_fwd(x, causal=True),
        ops.softmax_fwd(x, out_dtype=torch.bfloat16),
    ]


def modules() -> list[torch.Tensor]:
    """A step of an FP8 MLP behind attention."""
    attention = te.DotProductAttention(4, 16, qkv_format="sbhd", attention_dropout=0.0)
    mlp = te.LayerNormMLP(64, 128, params_dtype=torch.float32)
    x = torch.randn(16, 2, 64, requires_grad=True)
    heads = x.view(16, 2, 4, 16)
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        out = mlp(attention(heads, heads, heads))
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in mlp.parameters())]


def layer() -> list[torch.Tensor]:
    """Two steps of a transformer layer with delayed scaling."""
    block = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32)
    x = torch.randn(16, 2, 64, requires_grad=True)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            out = block(x)
        out.square().mean().backward()
    return [out.detach(), x.grad]


PARTS: dict[str, Callable[[], list[torch.Tensor]]] = {"primitives": primitives, "modules": modules, "layer": layer}


def main(parts: list[str]) -> dict[str, Any]:
    ran: dict[str, list[str]] = {}

    def note(operator: Any, accepted: Any, args: tuple[Any, ...], result: Any) -> None:
        pieces = [piece.chosen.id for piece in accepted.pieces.values()]
        name = f"{accepted.id}({', '.join(pieces)})" if pieces else accepted.id
        if name not in ran.setdefault(operator.name, []):
            ran[operator.name].append(name)

    torch.manual_seed(7)
    checksum = hashlib.sha256()
    finite = True
    with te_dispatch.observe(note):
        for part in parts:
            for tensor in PARTS[part]():
                checksum.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
                finite &= bool(torch.isfinite(tensor.float()).all())
    snapshot = MANAGER.snapshot
    return {
        "ran": ran,
        "checksum": checksum.hexdigest(),
        "finite": finite,
        "backends": sorted(snapshot.backends),
        "failures": [str(failure) for failure in snapshot.failures],
        "unavailable": dict(snapshot.unavailable),
        "unusable": dict(snapshot.unusable),
        "lacking": {name: list(parameters) for name, parameters in snapshot.lacking.items()},
        "device": MANAGER.device_facts(torch.device("cpu")).label(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:] or ["primitives", "modules"])))
