# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that are like an earlier one take a short way: it gives the long one's bits, and is left where it must be."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_dispatch.core import scopes
from te_dispatch.ops.checks import likeness
from te_dispatch.pytorch.autocast import current_state
from te_dispatch.pytorch.module import GemmModule

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "most_recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=2),
    "by_callable": DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history.amax(0)),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(64, 96, device="cpu"),
    "Linear without bias": lambda: te.Linear(64, 96, device="cpu", bias=False),
    "Linear of three": lambda: te.Linear(64, 96, device="cpu", parameters_split=("q", "k", "v")),
    "Linear returning its bias": lambda: te.Linear(64, 96, device="cpu", return_bias=True),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96, device="cpu"),
    "LayerNormLinear, RMS": lambda: te.LayerNormLinear(64, 96, device="cpu", normalization="RMSNorm"),
    "LayerNormLinear returning its norm": lambda: te.LayerNormLinear(
        64, 96, device="cpu", return_layernorm_output=True
    ),
    "LayerNormLinear passing its input": lambda: passing(
        te.LayerNormLinear(64, 96, device="cpu", normalization="RMSNorm")
    ),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, device="cpu"),
    "TransformerLayer": lambda: te.TransformerLayer(
        64, 64, 2, device="cpu", hidden_dropout=0.0, attention_dropout=0.0, layer_number=1
    ),
}


def passing(module: te.LayerNormLinear) -> te.LayerNormLinear:
    module.passes_input = True
    return module


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    module = MODULES[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def step(module: torch.nn.Module, recipe: Any, seed: int, trains_x: bool = True) -> list[torch.Tensor]:
    """Everything that a training step gives, with an input and a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 1, 64, generator=generator).requires_grad_(trains_x)
    module.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = module(x)
    results = [out] if isinstance(out, torch.Tensor) else [part for part in out if part is not None]
    grads = [torch.randn(part.shape, generator=generator) for part in results]
    torch.autograd.backward(results, grads)
    return [*results, *([x.grad] if trains_x else []), *(p.grad for p in module.parameters())]


def state_of(module: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for part in module.modules():
        if isinstance(part, GemmModule):
            for scales in part._live().values():
                found += [scales.history, scales.scale, scales.scale_amax]
    return found


def without_short_way(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(GemmModule, "_learn", lambda *args: None)
    return monkeypatch


def settled(module: torch.nn.Module) -> bool:
    """Whether a backward's steps are known, too."""
    return any(
        known.options.steps is not None and known.options.steps.fits is not None
        for part in module.modules()
        if isinstance(part, GemmModule)
        for known in part._known
    )


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_settled_call_has_the_bits_of_any_other(
    name: str, recipe: str, trains_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = made(name)
    found = [step(module, RECIPES[recipe], seed, trains_x) for seed in range(4)]
    scales = state_of(module)
    if "returning" not in name and recipe in ("delayed", "current", "block"):
        assert settled(module)
    without_short_way(monkeypatch)
    twin = made(name)
    expected = [step(twin, RECIPES[recipe], seed, trains_x) for seed in range(4)]
    assert all(not part._known for part in twin.modules() if isinstance(part, GemmModule))
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(scales, state_of(twin), strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


RECIPE = RECIPES["delayed"]


def trained() -> te.Linear:
    """A Linear whose call with a (32, 1, 64) is settled."""
    module = made("Linear")
    for seed in range(2):
        step(module, RECIPE, seed)
    assert settled(module)
    return module


def operators(call: Callable[[], Any]) -> list[str]:
    calls: list[str] = []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(operator.name)):
        call()
    return calls


def test_an_observer_sees_every_operator_of_a_settled_call() -> None:
    module = trained()
    assert operators(lambda: step(module, RECIPE, 3)) == [
        "quantize", "quantize", "gemm", "update_delayed_scales", "quantize_dbias", "gemm", "gemm",
        "update_delayed_scales",
    ]  # fmt: skip
    # And one who comes between forward and backward sees the forward's policy, which had none.
    x = torch.randn(32, 1, 64, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        out = module(x)
    assert operators(lambda: out.sum().backward()) == []


def test_a_policy_is_followed_by_a_settled_module() -> None:
    module, seen = trained(), []

    def watch(operator: Any, accepted: Any, args: Any, result: Any) -> None:
        seen.append(accepted.id.partition(".")[0])

    with te_dispatch.using(gemm="reference"):
        out = [step(module, RECIPE, 3) for _ in range(2)]
        with scopes.observe(watch):
            step(module, RECIPE, 3)
    assert "reference" in seen and len(out) == 2
    step(module, RECIPE, 3)
    known = module._known
    te_dispatch.set_policy("deterministic")
    try:
        step(module, RECIPE, 3)
        assert module._known and module._known[0] is not known[0]
    finally:
        te_dispatch.set_policy(None)


def same_as_unsettled(
    module: te.Linear, call: Callable[[te.Linear], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`call` gives what it gives with a copy that has settled nothing and does not."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    assert not twin._known and module._known
    found = call(module)
    with monkeypatch.context() as patch:
        without_short_way(patch)
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
@pytest.mark.parametrize("natively", [True, False], ids=["", "likeness in Python"])
def test_a_settled_module_follows_what_changes(
    natively: bool, call: Callable[[te.Linear], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(likeness, "TensorGuards", None)
    same_as_unsettled(trained(), call, monkeypatch)


def test_an_input_that_takes_a_gradient_later_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "TensorGuards", None)
    module = made("Linear")
    for seed in range(2):
        step(module, RECIPE, seed, False)
    assert settled(module)
    same_as_unsettled(module, lambda module: step(module, RECIPE, 3), monkeypatch)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("natively", [True, False], ids=["", "likeness in Python"])
def test_bad_inputs_are_refused_by_a_settled_module(natively: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:
        monkeypatch.setattr(likeness, "TensorGuards", None)
    module = made(name)
    for seed in range(2):
        step(module, RECIPE, seed)
    assert settled(module)
    x = torch.randn(32, 1, 64)
    with te.autocast(recipe=RECIPE):
        for bad, message in ((x.double(), "inp must be"), (x[..., :60], "inp must be"), (x[:8], "divisible by 16")):
            with pytest.raises(ValueError, match=message):
                module(bad)
        for no_tensor in (x.tolist(), None):
            with pytest.raises(TypeError, match="inp must be a tensor"):
                module(no_tensor)
        with pytest.raises(RuntimeError, match="no second derivative"):
            module(x.requires_grad_()).sum().backward(create_graph=True)


def test_copies_settle_for_themselves() -> None:
    module = trained()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not twin._known
        step(twin, RECIPE, 1)
        assert twin._known and twin._known[0].options.plan is not module._known[0].options.plan


def test_what_is_settled_keeps_no_tensor_of_a_call_and_no_module() -> None:
    module, watched = made("Linear"), []
    for _ in range(3):
        x = torch.randn(32, 1, 64, requires_grad=True)
        with te.autocast(recipe=RECIPE):
            out = module(x)
        dy = torch.ones_like(out)
        out.backward(dy)
        watched += [weakref.ref(tensor) for tensor in (x, out, dy)]
        del x, out, dy
    assert settled(module)
    gc.collect()
    assert all(ref() is None for ref in watched)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_settled_call_saves_what_hooks_of_its_graph_can_see_and_free() -> None:
    module = trained()
    x = torch.randn(32, 1, 64, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        out = module(x)
    assert [tuple(t.shape) for t in out.grad_fn.saved_tensors] == [(64, 32), (1,), (64, 96), (1,)]
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_autocasts_of_the_same_arguments_share_their_state() -> None:
    def state(**arguments: Any) -> Any:
        with te.autocast(**arguments):
            return current_state()

    one = state(recipe=RECIPE)
    assert state(recipe=RECIPE) is one and state(recipe=DelayedScaling(amax_history_len=3)) is one
    assert one.recipe == RECIPE and one.enabled and not one.calibrating
    group = object()
    others = [
        state(recipe=DelayedScaling(amax_history_len=4)), state(recipe=RECIPE, amax_reduction_group=group),
        state(recipe=RECIPE, enabled=False), state(recipe=RECIPE, calibrating=True),
    ]  # fmt: skip
    assert len({id(each) for each in (one, *others)}) == 5
    assert others[1].process_group is group and not others[2].enabled and others[3].calibrating
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="fp8_dpa"):
            state(recipe=DelayedScaling(fp8_dpa=True))
        assert not state(recipe=DelayedScaling(fp8_dpa=True), enabled=False).enabled
