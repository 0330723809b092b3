# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whatever a captured call depends on may change: the module then gives what it would have given without a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.ops.checks import guards

from .capturing import RECIPE, RECIPES, captured, made, state_of, step, trained, without_capture


def same_as_plain(
    module: te.Linear, call: Callable[[te.Linear], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`call` gives what it gives with a copy that has captured nothing and does not."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    assert not twin.captured_calls.signatures and module.captured_calls.signatures
    found = call(module)
    with monkeypatch.context() as patch:
        without_capture(patch)
        expected = call(twin)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(state_of(module), state_of(twin), strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def other_recipe(module: te.Linear) -> list[torch.Tensor]:
    return step(module, RECIPES["current"], 5)


def no_recipe(module: te.Linear) -> list[torch.Tensor]:
    return step(module, None, 5)


def other_margin(module: te.Linear) -> list[torch.Tensor]:
    return step(module, DelayedScaling(amax_history_len=3, margin=1), 5)


def in_place(module: te.Linear) -> list[torch.Tensor]:
    with torch.no_grad():
        module.weight.mul_(2.0)
    return step(module, RECIPE, 5)


def other_parameter(module: te.Linear) -> list[torch.Tensor]:
    module.weight = torch.nn.Parameter(module.weight.detach() * 3.0)
    return step(module, RECIPE, 5)


def without_bias(module: te.Linear) -> list[torch.Tensor]:
    module.bias = None
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    out.backward(torch.ones_like(out))
    return [out, x.grad, module.weight.grad]


def turned(module: te.Linear) -> list[torch.Tensor]:
    module.weight.data = module.weight.data.t().contiguous().t()
    return step(module, RECIPE, 5)


def frozen(module: te.Linear) -> list[torch.Tensor]:
    module.weight.requires_grad_(False)
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    out.backward(torch.ones_like(out))
    assert module.weight.grad is None or not module.weight.requires_grad
    return [out, x.grad, module.bias.grad]


def moved_state(module: te.Linear) -> list[torch.Tensor]:
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    return step(module, RECIPE, 5)


def cast_and_back(module: te.Linear) -> list[torch.Tensor]:
    module.bfloat16().float()
    return step(module, RECIPE, 5)


def other_shapes(module: te.Linear) -> list[torch.Tensor]:
    found = []
    for shape in ((32, 64), (16, 2, 64), (48, 64), (16, 64), (64, 64), (32, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(recipe=RECIPE):
            out = module(x)
        out.backward(torch.ones_like(out))
        found += [out, x.grad]
    return found


def lying_otherwise(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).t().reshape(32, 1, 64).requires_grad_()
    turned = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(1)).permute(2, 1, 0).requires_grad_()
    with te.autocast(recipe=RECIPE):
        a, b = module(x), module(turned)
    (a + b).backward(torch.ones_like(a))
    return [a, b, x.grad, turned.grad]


def gradient_of_one_element(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    out.sum().backward()  # expanded: no strides
    return [out, x.grad, module.weight.grad]


def only_one_gradient(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    dy = torch.ones_like(out)
    (dx,) = torch.autograd.grad(out, (x,), dy, retain_graph=True)
    (dw,) = torch.autograd.grad(out, (module.weight,), dy, retain_graph=True)
    (db,) = torch.autograd.grad(out, (module.bias,), dy, retain_graph=True)
    again = torch.autograd.grad(out, (x, module.weight, module.bias), dy)
    return [out, dx, dw, db, *again]


def without_gradients(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1))
    with te.autocast(recipe=RECIPE), torch.no_grad():
        out = module(x)
    with te.autocast(recipe=RECIPE), torch.inference_mode():
        again = module(x)
    return [out, again.clone()]


def under_torch_autocast(module: te.Linear) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(recipe=RECIPE):
            out = module(x)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward(torch.ones_like(out))
    return [out, x.grad, module.weight.grad]


def backward_under_torch_autocast(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward(torch.ones_like(out))
    return [out, x.grad, module.weight.grad]


def checkpointed(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        a = checkpoint(module, x, use_reentrant=False)
        b = checkpoint(module, x, use_reentrant=True)
    (a + 2 * b).backward(torch.ones_like(a))
    return [a, b, x.grad, module.weight.grad]


def recomputed_inside_autocast(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        a = checkpoint(module, x, use_reentrant=True)
    with te.autocast(recipe=RECIPE):
        a.backward(torch.ones_like(a))  # the scales were updated since
    return [a, x.grad, module.weight.grad]


def given_a_quantized_gradient(module: te.Linear) -> list[torch.Tensor]:
    torch.manual_seed(1)
    after = te.Linear(96, 64, device="cpu")
    x = torch.randn(32, 1, 64).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = after(module(x), fp8_grad=True)
    out.backward(torch.ones_like(out))
    return [out, x.grad, module.weight.grad, module.bias.grad]


def input_without_gradient(module: te.Linear) -> list[torch.Tensor]:
    return [*step(module, RECIPE, 5, False), *step(module, RECIPE, 6, False), *step(module, RECIPE, 7, True)]


def microbatches(module: te.Linear) -> list[torch.Tensor]:
    found = []
    for first in (True, False, None, False):
        x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(recipe=RECIPE):
            out = module(x, is_first_microbatch=first)
        out.backward(torch.ones_like(out))
        found += [out, x.grad]
    return found


def quantized_edges(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        out = module(x, fp8_output=True, fp8_grad=True)
        plain = module(x)
    assert isinstance(out, te.QuantizedTensor) and not isinstance(plain, te.QuantizedTensor)
    plain.backward(torch.ones_like(plain))
    return [out.dequantize(), plain, x.grad]


def calibrating(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1))
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        return [module(x)]


def nested(module: te.Linear) -> list[torch.Tensor]:
    x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1))
    with te.autocast(recipe=RECIPE):
        with te.autocast(enabled=False):
            a = module(x)
        b = module(x)
        with te.autocast(recipe=RECIPES["block"]):
            c = module(x)
        d = module(x)
    return [a, b, c, d]


@pytest.mark.parametrize(
    "call",
    [
        other_recipe, no_recipe, other_margin, in_place, other_parameter, without_bias, turned, frozen, moved_state,
        cast_and_back, other_shapes, lying_otherwise, gradient_of_one_element, only_one_gradient, without_gradients,
        under_torch_autocast, backward_under_torch_autocast, checkpointed, recomputed_inside_autocast, microbatches,
        quantized_edges, given_a_quantized_gradient, input_without_gradient, calibrating, nested,
    ],
)  # fmt: skip
@pytest.mark.parametrize("natively", [True, False], ids=["", "guards in Python"])
def test_a_captured_module_follows_what_changes(
    natively: bool, call: Callable[[te.Linear], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(guards, "TensorGuards", None)
    same_as_plain(trained(), call, monkeypatch)


def test_an_input_that_takes_a_gradient_later_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "TensorGuards", None)
    module = made("Linear")
    for seed in range(2):
        step(module, RECIPE, seed, False)
    assert captured(module)
    same_as_plain(module, lambda module: step(module, RECIPE, 3), monkeypatch)
