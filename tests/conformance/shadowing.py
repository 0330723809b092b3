# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the tests of shadow mode share: policies, a backend that is wrong, and a job's steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_dispatch.core.policy import Policy, Selector, Shadow
from te_dispatch.core.shadow import Comparisons

RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}

#: A backend whose GEMM is wrong in one element where k is 32, one of whose norms mixes up a gradient, whose softmax
#: always declines, and whose sum of rows has the wrong form.
WRONG = """
    import functools
    from te_dispatch.core.errors import Declined
    from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
    from te_dispatch.core.requirements import OneOf

    PLAIN = (OneOf("a.scaling", "none"), OneOf("b.scaling", "none"))
    BACKEND = Manifest("wrong", API_VERSION, (
        Implementation("gemm@1", "matmul", "te_dispatch_wrong:gemm", PLAIN, rank=900),
        Implementation("rmsnorm_fwd@1", "rmsnorm_fwd", "te_dispatch_wrong:rmsnorm_fwd", rank=900),
        Implementation("rmsnorm_bwd@1", "rmsnorm_bwd", "te_dispatch_wrong:rmsnorm_bwd", rank=900),
        Implementation("softmax_fwd@1", "softmax_fwd", "te_dispatch_wrong:softmax_fwd", rank=900),
        Implementation("softmax_bwd@1", "softmax_bwd", "te_dispatch_wrong:softmax_bwd", rank=900),
        Implementation("activation_fwd@1", "activation_fwd", "te_dispatch_wrong:activation_fwd", rank=900),
        Implementation("activation_bwd@1", "activation_bwd", "te_dispatch_wrong:activation_bwd", rank=900),
    ))

    def __getattr__(name):
        if name not in SOUND:
            raise AttributeError(name)
        import importlib
        module, change = SOUND[name]
        sound = getattr(importlib.import_module(f"te_dispatch_torch.{module}"), "matmul" if name == "gemm" else name)

        @functools.wraps(sound)
        def spoilt(*args, **kwargs):
            return change(sound, args, kwargs)

        return spoilt

    def one_element(sound, args, kwargs):
        found = sound(*args, **kwargs)
        if args[0].shape[-1] == 32:
            found.out.view(-1)[3] += 1.0
        return found

    def gradient(sound, args, kwargs):
        found = sound(*args, **kwargs)
        return found._replace(dgamma=found.dgamma * 1.5)

    def declined(sound, args, kwargs):
        raise Declined("never")

    def form(sound, args, kwargs):
        found = sound(*args, **kwargs)
        return found._replace(out=found.out.reshape(-1))

    def same(sound, args, kwargs):
        return sound(*args, **kwargs)

    SOUND = {
        "gemm": ("gemm", one_element), "rmsnorm_fwd": ("norm", same), "rmsnorm_bwd": ("norm", gradient),
        "softmax_fwd": ("softmax", declined), "softmax_bwd": ("softmax", same),
        "activation_fwd": ("activation", form), "activation_bwd": ("activation", same),
    }
"""


def shadowing(folder: Path, on_mismatch: str = "raise", prefer: str = "torch", **fields: Any) -> Policy:
    given = {"against": "reference", "fraction": 1.0, "directory": str(folder), **fields}
    found = Shadow(on_mismatch=on_mismatch, **given)
    # Samplers belong to a folder's bindings, so tests do not share them.
    return Policy(name=f"shadow {folder}", prefer=(Selector(prefer), Selector("torch")), shadow=found)


def of(operator: str) -> Comparisons:
    found = [one for one in te_dispatch.shadow_report() if one.operator == operator]
    assert len(found) == 1, te_dispatch.shadow_report()
    return found[0]


def totals() -> Counter[str]:
    found: Counter[str] = Counter()
    for one in te_dispatch.shadow_report():
        found.update(sampled=one.sampled, compared=one.compared, mismatched=one.mismatched)
        found["not_comparable"] += sum(one.not_comparable.values())
        assert one.sampled == one.compared + one.mismatched + sum(one.not_comparable.values())
    return found


def product(k: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(8, k, generator=generator), torch.randn(16, k, generator=generator)


def steps(module: torch.nn.Module, x: torch.Tensor, recipe: Any, count: int = 2) -> list[torch.Tensor]:
    """Gradients and results of a few steps."""
    made = []
    for _ in range(count):
        module.zero_grad()
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe or DelayedScaling()):
            y = module(x)
        y.float().pow(2).mean().backward()
        made += [
            y.detach().clone(),
            x.grad.clone(),
            *(p.grad.clone() for p in module.parameters() if p.grad is not None),
        ]
    return made
