# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Assigning to recipes: what is checked, what follows, and what regions and states see of it."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import sys
import threading
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from te_dispatch.common.recipe_values import CHANGES
from te_dispatch.core import scopes
from te_dispatch.pytorch.compile import recipes
from te_dispatch.pytorch.fp8.autocast import current_state, thread

RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]


def _linear() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu")


def _quantizers(layer: te.Linear, recipe: Recipe, rows: int = 32) -> list[Any]:
    """The quantizers of one step."""
    seen: list[Any] = []

    def note(operator: Any, accepted: Any, args: Any, result: Any) -> None:
        if operator.name in ("quantize", "quantize_dbias"):
            seen.append(args[1])

    with scopes.observe(note):
        with te.autocast(recipe=recipe):
            y = layer(torch.randn(rows, 32))
        y.sum().backward()
    return seen


# -- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES, ids=lambda kind: kind.__name__)
def test_an_assigned_attribute_is_that_of_a_new_recipe(kind: Any) -> None:
    recipe, before = kind(), kind()
    recipe.backward_override = "dequantized"
    assert recipe == kind(backward_override="dequantized") and recipe != before
    assert hash(recipe) == hash(kind(backward_override="dequantized"))
    assert "backward_override='dequantized'" in repr(recipe)
    recipe.backward_override = None
    assert recipe == before


@pytest.mark.parametrize(
    ("make", "name", "value", "error", "words"),
    [
        (DelayedScaling, "amax_history_len", 0, ValueError, "amax_history_len must be at least 1, got 0"),
        (DelayedScaling, "backward_override", "fast", ValueError, "backward_override must be one of"),
        (DelayedScaling, "fp8_format", "HYBRID", TypeError, "fp8_format must be a Format"),
        (Float8BlockScaling, "x_block_scaling_dim", 2, ValueError, "2D times 2D"),
        (Float8CurrentScaling, "fp8_quant_fwd_inp", True, TypeError, "fp8_quant_fwd_inp must be a QParams, got True"),
        (NVFP4BlockScaling, "fp4_quant_bwd_grad", None, TypeError, "fp4_quant_bwd_grad must be a QParams, got None"),
        (DelayedScaling, "backward_overide", None, AttributeError, "no 'backward_overide' to assign, only margin"),
        (MXFP8BlockScaling, "fp8_quant_fwd_inp", QParams(), AttributeError, "no 'fp8_quant_fwd_inp' to assign"),
    ],
)  # fmt: skip
def test_a_refused_value_changes_nothing(make: Any, name: str, value: Any, error: Any, words: str) -> None:
    recipe = make()
    with pytest.raises(error, match=words):
        setattr(recipe, name, value)
    assert recipe == make() and vars(recipe) == vars(make())
    with pytest.raises(AttributeError, match="margin cannot be deleted"):
        del recipe.margin


def test_assigned_casts_hold_whatever_the_knobs_say() -> None:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=2.0)
    recipe.use_power_2_scales = True
    assert recipe.fp8_quant_fwd_inp == QParams(amax_epsilon=2.0)
    assert recipe.fp8_quant_fwd_weight == recipe.fp8_quant_bwd_grad == QParams(power_2_scale=True)
    assert recipe != Float8CurrentScaling(use_power_2_scales=True)
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)  # what the knob gives
    assert recipe == Float8CurrentScaling(use_power_2_scales=True)
    assert hash(recipe) == hash(Float8CurrentScaling(use_power_2_scales=True))


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
@pytest.mark.parametrize("used", [False, True])
def test_copies_are_equal_and_their_own(how: Any, used: bool) -> None:
    recipe = Float8CurrentScaling(use_power_2_scales=True)
    recipe.fp8_quant_bwd_grad = QParams(amax_epsilon=1.0)
    if used:
        with te.autocast(recipe=recipe):
            pass
    made = how(recipe)
    assert made == recipe and made.fp8_quant_bwd_grad == QParams(amax_epsilon=1.0)
    made.use_power_2_scales = False
    assert recipe.use_power_2_scales and made != recipe
    with te.autocast(recipe=made):
        assert current_state().recipe == made
    with te.autocast(recipe=recipe):
        assert current_state().recipe == recipe
    assert dataclasses.replace(recipe, use_power_2_scales=False) == Float8CurrentScaling()


def test_a_pickled_recipe_has_no_name_of_this_process() -> None:
    recipe = DelayedScaling(margin=3)
    with te.autocast(recipe=recipe):
        assert recipe._name is not None
        assert set(copy.copy(recipe).__dict__) == set(DelayedScaling().__dict__)
        assert pickle.loads(pickle.dumps(current_state().recipe))._name is None


def test_recipes_that_were_pickled_frozen_load() -> None:
    fields = {field.name: getattr(DelayedScaling(margin=2), field.name) for field in dataclasses.fields(DelayedScaling)}
    recipe = DelayedScaling.__new__(DelayedScaling)
    recipe.__setstate__(fields)
    assert recipe == DelayedScaling(margin=2)
    with pytest.raises(TypeError, match="margin"):
        recipe.margin = "x"  # type: ignore[assignment]


@dataclasses.dataclass
class Noted(DelayedScaling):
    """A user's recipe, which dataclasses make without a hash."""

    note: str = ""


def test_a_recipe_of_a_users_class() -> None:
    first, second = Noted(note="a"), Noted(note="b")
    thread.states.clear()  # else it may be full, and cleared in between
    with te.autocast(recipe=first):
        state = current_state()
    with te.autocast(recipe=second):
        assert current_state() is not state and current_state().recipe == second
    second.note = "a"
    with te.autocast(recipe=second):
        assert current_state() is state


# -- regions ------------------------------------------------------------------------------------------------------


def test_a_region_has_the_recipe_as_it_was() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    first = te.autocast(recipe=recipe)
    recipe.amax_history_len = 5
    second = te.autocast(recipe=recipe)
    with first:
        assert current_state().recipe == DelayedScaling(amax_history_len=3)
        with second:
            assert current_state().recipe == DelayedScaling(amax_history_len=5)
            recipe.margin = 1
            assert current_state().recipe == DelayedScaling(amax_history_len=5)
    with te.autocast(recipe=recipe):
        assert current_state().recipe == DelayedScaling(amax_history_len=5, margin=1)


def test_what_is_in_use_cannot_be_changed() -> None:
    with te.autocast(recipe=DelayedScaling()):
        used = current_state().recipe
    with pytest.raises(AttributeError, match=r"DelayedScaling: margin cannot be assigned.*copy\.copy"):
        used.margin = 1
    mine = copy.copy(used)
    mine.margin = 1
    assert used == DelayedScaling() and mine == DelayedScaling(margin=1)


def test_a_change_between_steps_reaches_the_casts() -> None:
    layer, recipe = _linear(), Float8CurrentScaling()
    assert not any(q.power_of_two for q in _quantizers(layer, recipe))
    recipe.use_power_2_scales = True
    assert all(q.power_of_two for q in _quantizers(layer, recipe))
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=7.0)
    x, w, dy = _quantizers(layer, recipe)
    assert (x.power_of_two, x.epsilon) == (False, 7.0)
    assert (w.power_of_two, w.epsilon) == (dy.power_of_two, dy.epsilon) == (True, 0.0)
    recipe.fp8_format = Format.E4M3
    assert _quantizers(layer, recipe)[2].encoding == "e4m3fn"


def test_a_change_between_steps_is_a_step_of_another_recipe() -> None:
    """Delayed scaling: the states move to the group of the equal recipe, whoever made it."""
    changed, plain = _linear(), _linear()
    recipe = DelayedScaling(amax_history_len=4)
    torch.manual_seed(1)
    for step in range(4):
        recipe.margin = step // 2
        x, results = torch.randn(16, 32), []
        for layer, given in ((changed, recipe), (plain, DelayedScaling(amax_history_len=4, margin=step // 2))):
            with te.autocast(recipe=given):
                y = layer(x)
            y.sum().backward()
            results.append(
                [y, layer.fp8_state.scales.forward.scale.clone(), layer.fp8_state.scales.backward.history.clone()]
            )
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert changed.fp8_state.scales.forward.group is plain.fp8_state.scales.forward.group


def test_a_key_is_found_again_after_the_change_is_undone() -> None:
    layer, recipe = _linear(), DelayedScaling(amax_history_len=2)
    plans = []
    for margin in (0, 1, 0):
        recipe.margin = margin
        with te.autocast(recipe=recipe):
            layer(torch.randn(16, 32))
            plans.append(current_state())
    assert plans[0] is plans[2] and plans[0] is not plans[1]


def test_backward_override_is_refused_where_it_is_used() -> None:
    recipe = DelayedScaling()
    with te.autocast(recipe=recipe):
        pass
    recipe.backward_override = "high_precision"
    with pytest.raises(NotImplementedError, match="backward_override='high_precision'"):
        te.autocast(recipe=recipe)
    recipe.backward_override = None
    te.autocast(recipe=recipe)


def test_the_default_nvfp4_recipe_with_plain_casts_can_be_used() -> None:
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp = QParams()
    recipe.fp4_quant_bwd_grad = QParams()
    x, w, dy = _quantizers(_linear(), recipe)
    assert (x.two_d, w.two_d, dy.two_d) == (False, True, False)
    recipe.fp4_quant_fwd_weight = QParams()
    recipe.fp4_quant_fwd_inp = QParams(fp4_2d_quantization=True)
    x, w, dy = _quantizers(_linear(), recipe)
    assert (x.two_d, w.two_d, dy.two_d) == (True, False, False)


@pytest.mark.parametrize(
    ("recipe", "name", "value", "words"),
    [
        (NVFP4BlockScaling(True, True), "fp4_quant_fwd_inp", QParams(random_hadamard_transform=True), "hadamard"),
        (NVFP4BlockScaling(True, True), "fp4_quant_fwd_weight", QParams(amax_epsilon=1.0), "weight.amax_epsilon=1.0"),
        (Float8BlockScaling(), "fp8_quant_bwd_grad", QParams(stochastic_rounding=True), "stochastic_rounding=True"),
        (Float8CurrentScaling(), "fp8_quant_fwd_inp", QParams(fp4_2d_quantization=True), "fp4_2d_quantization=True"),
    ],
)
def test_options_of_casts_without_effect_are_refused_where_used(recipe: Any, name: str, value: Any, words: str) -> None:
    setattr(recipe, name, value)
    with pytest.raises(NotImplementedError, match=words):
        te.autocast(recipe=recipe)


def test_equal_recipes_share_a_state_and_new_ones_leave_nothing() -> None:
    with te.autocast(recipe=DelayedScaling(amax_history_len=7)):
        first = current_state()
    count = len(thread.states)
    for _ in range(5):
        with te.autocast(recipe=DelayedScaling(amax_history_len=7)):
            assert current_state() is first
    assert len(thread.states) == count


def test_recipes_that_nothing_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of its own at every step: what is in use is kept, the rest is not, and all can be used again."""
    monkeypatch.setattr(recipes, "_KEPT", len(recipes._names) + 16)
    layer, kept = _linear(), Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True)
    with te.autocast(recipe=kept):
        layer(torch.randn(16, 32))
    plan, made = layer.fp8_state.plan, []
    for _ in range(400):
        made.append(DelayedScaling(amax_compute_algo=lambda history: history.amax(0)))
        with te.autocast(recipe=made[-1]):
            pass
    assert len(recipes._names) == len(vars(recipes._named)) <= recipes._KEPT + 64
    for recipe in (made[0], made[-1], copy.copy(made[1])):
        with te.autocast(recipe=recipe):
            assert current_state().recipe == recipe
    with te.autocast(recipe=kept):
        layer(torch.randn(16, 32))
    assert layer.fp8_state.plan is plan


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_a_recipe_changes_leaves_a_child_that_can_use_recipes() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with CHANGES:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        recipe = DelayedScaling(margin=1)
        recipe.margin = 2
        te.autocast(recipe=recipe)
        os._exit(0)
    done.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_threads_that_make_recipes_forget_none_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "_KEPT", 1)
    failures: list[BaseException] = []

    def use(first: int) -> None:
        try:
            for margin in range(first, first + 200):
                with te.autocast(recipe=DelayedScaling(margin=margin, amax_history_len=11)):
                    assert current_state().recipe.margin == margin
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(1000 * i,)) for i in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def test_a_recipe_that_threads_change_and_use_is_one_of_its_values() -> None:
    """What a region gets is never a mixture, and after the last change it is the last value."""
    recipe, failures = Float8BlockScaling(), []
    values = [(1, 2, 1), (2, 1, 1)]

    def use() -> None:
        for _ in range(300):
            found = te.autocast(recipe=recipe)._state.recipe
            dims = (found.x_block_scaling_dim, found.w_block_scaling_dim, found.grad_block_scaling_dim)
            if sum(dim == 2 for dim in dims) > 1:
                failures.append(dims)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for t in threads:
        t.start()
    for i in range(100):
        x, w, g = values[(i + 1) % 2]
        recipe.w_block_scaling_dim = recipe.x_block_scaling_dim = 1
        recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim = x, w, g
    for t in threads:
        t.join()
    assert not failures
    assert te.autocast(recipe=recipe)._state.recipe == recipe


# -- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_region_is_traced_anew_after_a_change() -> None:
    layer, recipe = _linear(), Float8CurrentScaling()
    x = torch.randn(16, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return layer(x)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    results = []
    for change in (lambda: None, lambda: setattr(recipe, "use_power_2_scales", True),
                   lambda: setattr(recipe, "fp8_quant_fwd_inp", QParams(amax_epsilon=100.0))):  # fmt: skip
        change()
        results.append(compiled(x))
        assert torch.equal(results[-1], run(x))
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
