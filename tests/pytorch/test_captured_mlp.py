# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A `LayerNormMLP` whose calls are captured gives the bits of one without, whatever changes between its calls."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.core import scopes
from te_dispatch.pytorch.capture.signatures import CapturedCalls

RECIPE = DelayedScaling(amax_history_len=3)
Results = list[torch.Tensor]


def made(**arguments: Any) -> te.LayerNormMLP:
    torch.manual_seed(0)
    module = te.LayerNormMLP(64, 96, device="cpu", **arguments)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def region(recipe: Any = RECIPE) -> AbstractContextManager[Any]:
    return nullcontext() if recipe is None else te.autocast(recipe=recipe)


def forward(module: te.LayerNormMLP, seed: int = 5, recipe: Any = RECIPE) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, what the module makes of it)."""
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    with region(recipe):
        return x, module(x)


def step(module: te.LayerNormMLP, seed: int = 5, recipe: Any = RECIPE) -> Results:
    module.zero_grad()
    x, out = forward(module, seed, recipe)
    outputs = list(out) if isinstance(out, tuple) else [out]
    torch.autograd.backward(outputs, [torch.randn_like(part) for part in outputs])
    return [*outputs, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def trained(**arguments: Any) -> te.LayerNormMLP:
    module = made(**arguments)
    for seed in range(2):
        step(module, seed)
    assert module.captured_calls.signatures and next(iter(module.captured_calls.signatures)).options.program.backwards
    return module


def same_as_plain(
    module: te.LayerNormMLP, call: Callable[[te.LayerNormMLP], Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`call` gives what it gives with a copy that has captured nothing and does not."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    assert module.captured_calls.signatures and not twin.captured_calls.signatures
    found, expected = [], []
    torch.manual_seed(3)
    found = call(module)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedCalls, "capture", lambda *args: None)
        torch.manual_seed(3)
        expected = call(twin)
    assert not twin.captured_calls.signatures
    for a, b in zip([*found, *states(module)], [*expected, *states(twin)], strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def states(module: te.LayerNormMLP) -> Results:
    return [
        t
        for scales in module.fp8_state.scales.live().values()
        for t in (scales.history, scales.scale, scales.scale_amax)
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": False}, {"normalization": "RMSNorm", "activation": "swiglu"}, {"zero_centered_gamma": True},
        {"activation": "clamped_swiglu", "activation_params": {"limit": 0.5}}, {"return_bias": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "recipe", [RECIPE, Float8CurrentScaling(), Float8BlockScaling(), None], ids=["delayed", "current", "block", "none"]
)
def test_every_kind_of_mlp_is_captured(arguments: dict[str, Any], recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(**arguments)

    def train(module: te.LayerNormMLP) -> Results:
        found = []
        for seed in range(3):
            module.zero_grad()
            x, out = forward(module, seed, recipe)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(torch.ones_like(out))
            found += [out, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        return found

    train(module)
    assert next(iter(module.captured_calls.signatures)).options.program.backwards
    same_as_plain(module, train, monkeypatch)


def test_an_observer_sees_every_operator_of_a_captured_mlp() -> None:
    module, calls = trained(), []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(operator.name)):
        step(module)
    assert sorted(calls) == sorted(
        ["quantize"] * 2 + ["layernorm_fwd", "layernorm_bwd", "activation_fwd", "activation_bwd", "quantize_dbias"]
        + ["gemm"] * 6 + ["update_delayed_scales"] * 2
    )  # fmt: skip


def test_a_captured_mlp_keeps_no_tensor_of_a_call() -> None:
    module = trained()
    x, out = forward(module)
    dy = torch.ones_like(out)
    out.backward(dy)
    watched = [weakref.ref(tensor) for tensor in (x, out, dy)]
    del x, out, dy
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_a_captured_mlp_saves_what_it_frees_as_it_goes() -> None:
    """The second product's input, the widest, is gone when the gradients of the norm's output are made."""
    module = trained()
    _, out = forward(module)
    saved = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() for t in saved) == 32 * 64 * 2 + 32 * 96 * 2 + 2 * 96 * 64 + 2 * 32 + 64 + 4
    wide = weakref.ref(next(t for t in saved if t.dtype == torch.uint8 and t.shape == (96, 32)))
    del saved
    assert wide() is not None
    alive = []
    (backward,) = next(iter(module.captured_calls.signatures)).options.program.backwards
    # The last two products are of the first layer: its input's gradient, then its weight's.
    gradients = [cell for cell in backward.run.__closure__ if "gemm" in getattr(cell.cell_contents, "__name__", "")]
    first = gradients[2].cell_contents

    def watching(*operands: Any) -> Any:
        alive.append(wide() is not None)
        return first(*operands)

    gradients[2].cell_contents = watching
    out.backward(torch.ones_like(out))
    assert alive == [False]
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(torch.ones_like(out))
