# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that are like an earlier one take a short way: it gives the long one's bits, and is left where it must be."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.ops.checks import guards
from te_dispatch.pytorch.fp8.autocast import current_state
from te_dispatch.pytorch.modules.gemm_module import GemmModule

from .capturing import MODULES, RECIPE, RECIPES, captured, made, operators, state_of, step, trained, without_capture


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_captured_call_has_the_bits_of_any_other(
    name: str, recipe: str, trains_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = made(name)
    found = [step(module, RECIPES[recipe], seed, trains_x) for seed in range(4)]
    scales = state_of(module)
    if "returning" not in name and recipe in ("delayed", "current", "block"):
        assert captured(module)
    without_capture(monkeypatch)
    twin = made(name)
    expected = [step(twin, RECIPES[recipe], seed, trains_x) for seed in range(4)]
    assert all(not part.captured_calls.signatures for part in twin.modules() if isinstance(part, GemmModule))
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(scales, state_of(twin), strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def test_an_observer_sees_every_operator_of_a_captured_call() -> None:
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


def test_a_policy_is_followed_by_a_captured_module() -> None:
    module, seen = trained(), []

    def watch(operator: Any, accepted: Any, args: Any, result: Any) -> None:
        seen.append(accepted.id.partition(".")[0])

    with te_dispatch.using(gemm="reference"):
        out = [step(module, RECIPE, 3) for _ in range(2)]
        with scopes.observe(watch):
            step(module, RECIPE, 3)
    assert "reference" in seen and len(out) == 2
    step(module, RECIPE, 3)
    known = list(module.captured_calls.signatures)
    te_dispatch.set_policy("deterministic")
    try:
        step(module, RECIPE, 3)
        assert module.captured_calls.signatures and next(iter(module.captured_calls.signatures)) is not known[0]
    finally:
        te_dispatch.set_policy(None)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("natively", [True, False], ids=["", "guards in Python"])
def test_bad_inputs_are_refused_by_a_captured_module(
    natively: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(guards, "TensorGuards", None)
    module = made(name)
    for seed in range(2):
        step(module, RECIPE, seed)
    assert captured(module)
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


def test_copies_are_captured_for_themselves() -> None:
    module = trained()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not twin.captured_calls.signatures
        step(twin, RECIPE, 1)
        assert (
            twin.captured_calls.signatures
            and next(iter(twin.captured_calls.signatures)).options.plan
            is not next(iter(module.captured_calls.signatures)).options.plan
        )


def test_what_is_captured_keeps_no_tensor_of_a_call_and_no_module() -> None:
    module, watched = made("Linear"), []
    for _ in range(3):
        x = torch.randn(32, 1, 64, requires_grad=True)
        with te.autocast(recipe=RECIPE):
            out = module(x)
        dy = torch.ones_like(out)
        out.backward(dy)
        watched += [weakref.ref(tensor) for tensor in (x, out, dy)]
        del x, out, dy
    assert captured(module)
    gc.collect()
    assert all(ref() is None for ref in watched)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_captured_call_saves_what_hooks_of_its_graph_can_see_and_free() -> None:
    module = trained()
    x = torch.randn(32, 1, 64, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        out = module(x)
    saved = [tuple(t.shape) for t in out.grad_fn.saved_tensors if t is not None]
    assert saved == [(64, 32), (1,), (64, 96), (1,)]
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
