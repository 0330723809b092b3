# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Threads that train models of their own with delayed scaling get the bits that each gets alone."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import thread

RECIPE = DelayedScaling(amax_history_len=3)


def _model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(te.LayerNormLinear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu"))


def _forward(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 5)
    with te.autocast(recipe=RECIPE):
        return model(x)


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    states = [
        scales for module in model for scales in (module.fp8_state.scales.forward, module.fp8_state.scales.backward)
    ]
    return [tensor.clone() for state in states for tensor in (state.history, state.scale)]


def _trained(model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    for step in range(steps):
        _forward(model, step).square().sum().backward()
    return _states(model)


def _in_thread(function: Any, *args: Any) -> Any:
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(function(*args)))
    worker.start()
    worker.join()
    return found[0]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_step_in_another_thread_updates_nothing_of_this_one() -> None:
    """One thread's steps begin and end while the other's model is between its casts and their update."""
    expected = _trained(_model(0), 4)
    model, other = _model(0), _model(1)
    for step in range(4):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 5)
        with te.autocast(recipe=RECIPE):
            y = model[0](x)
            _in_thread(_trained, other, 1)
            y = model[1](y)
        y.register_hook(lambda grad: _in_thread(_trained, other, 1) and None)
        y.square().sum().backward()
    assert _same(_states(model), expected)


def test_threads_that_train_at_the_same_time() -> None:
    models = [_model(seed) for seed in range(4)]
    expected = [_trained(_model(seed), 12) for seed in range(4)]
    found: dict[int, Any] = {}
    start = threading.Barrier(4)

    def train(i: int) -> None:
        start.wait()
        try:
            found[i] = _trained(models[i], 12)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(_same(found[i], expected[i]) for i in range(4))


def test_a_model_that_another_thread_goes_on_training() -> None:
    expected = _trained(_model(0), 6)
    model = _model(0)
    _trained(model, 2)
    for step in range(2, 6):
        if step % 2:
            _forward(model, step).square().sum().backward()
        else:
            _in_thread(lambda step=step: _forward(model, step).square().sum().backward())
    assert _same(_states(model), expected)


def test_a_backward_in_another_thread_than_its_forward() -> None:
    expected = _trained(_model(0), 4)
    model = _model(0)
    for step in range(4):
        loss = _forward(model, step).square().sum()
        _in_thread(loss.backward)
    assert _same(_states(model), expected)


def test_recipes_that_are_made_anew_leave_no_groups_behind() -> None:
    """Groups of other tests' modules that are still alive are not counted."""
    model, recipes = _model(0), []
    for step in range(80):
        recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.amax(0), margin=step)
        recipes.append(recipe)
        with te.autocast(recipe=recipe):
            y = model(torch.randn(16, 32))
        y.sum().backward()
    groups = [group for group in scale_update.trainer().groups if group.recipe in recipes]
    assert sum(bool(group.states()) for group in groups) == 2
    assert len(groups) < 6
    assert len(thread.states) <= 64


def test_an_interrupted_registration_is_made_good() -> None:
    class Interrupted(scale_update.ScaleGroup):
        __slots__ = ("interrupts",)

        def regroup(self, _: Any = None) -> None:
            super().regroup(_)
            if getattr(self, "interrupts", False):
                self.interrupts = False
                raise KeyboardInterrupt

    layer = te.Linear(32, 32, device="cpu")
    with te.autocast(recipe=RECIPE):
        layer(torch.ones(16, 32))
    state = layer.fp8_state.scales.forward
    group = Interrupted(RECIPE, None, torch.device("cpu"), True)
    group.interrupts = True
    with contextlib.suppress(KeyboardInterrupt):
        group.add(state)
    group.add(state)
    assert state.group is group and group.states() == [state]
    group.update()
    assert group.updates == 1
