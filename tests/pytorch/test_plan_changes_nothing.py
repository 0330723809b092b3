# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A plan leaves no trace: not in the module, not in the process, and not in the bits of the next step."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe as recipes
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.distributed.rng_tracker import RngStatesTracker
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.amax_reduction import _constructed
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.modules import main_grads
from te_dispatch.torch_private import graph_task
from tests.pytorch.planned_modules import HIDDEN, MODULES, RECIPES, SEQUENCE, step

pytestmark = pytest.mark.sampled(24)


def bits(value: Any) -> Any:
    """Something to compare tensors of any dtype with, NaN included."""
    return value.detach().contiguous().view(torch.uint8) if isinstance(value, torch.Tensor) and value.dim() else value


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(bits(v), bits(other[k])) for k, v in one.items())


def of_module(module: torch.nn.Module) -> list[Any]:
    """What a module's objects hold, by identity."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in vars(part).items():
            found.append((name, id(value)))
            if isinstance(value, (list, dict)):  # known calls are among them
                found += [(name, id(entry)) for entry in (value.values() if isinstance(value, dict) else value)]
    return found


def of_process() -> dict[str, Any]:
    """What the process holds."""
    gc.collect()
    entries = {
        name: (id(dispatcher.lookup), len(dispatcher.entries), [len(e.memory) for e in dispatcher.entries.values()])
        for name, dispatcher in MANAGER.bindings.dispatchers.items()
    }
    return {
        "entries": entries,
        "operand formats": dict(MANAGER.bindings.operand_formats),
        "snapshot": id(MANAGER.snapshot),
        "kept": list(MANAGER._kept),
        "tokens": {token: id(bindings) for token, bindings in MANAGER.tokens.items()},
        "said": {name: len(v) for name, v in vars(MANAGER._announcements).items() if hasattr(v, "__len__")},
        "scopes": (MANAGER.current.get(), MANAGER.mirror.bindings, MANAGER.namespace._scoped),
        "autocast": (thread.state, {key: id(state) for key, state in thread.states.items()}),
        "groups": (
            id(scale_update.trainer()),
            [(id(g), g.dirty, g.updates, len(g.states())) for g in scale_update.trainer().groups],
        ),
        "open tasks": dict(scale_update._open_tasks),
        "constructed": (_constructed.count, _constructed.history),
        "rng": torch.get_rng_state().tolist(),
        "gradients": (torch.is_grad_enabled(), graph_task()),
    }


CASES = [
    *((name, recipe, True) for name in ("Linear, divided", "LayerNormMLP", "TransformerLayer") for recipe in RECIPES),
    *((name, "delayed", False) for name in MODULES),
    ("DotProductAttention", "none", True),
    ("RMSNorm", "none", True),
]


@pytest.mark.parametrize(("name", "recipe", "trained"), CASES)
def test_everything_stays(name: str, recipe: str, trained: bool) -> None:
    gc.collect()
    example, used = MODULES[name], RECIPES[recipe]()
    torch.manual_seed(0)
    module, inputs = example.make(), example.inputs()
    for _ in range(3 if trained else 0):
        step(module, inputs, used)
    twin = copy.deepcopy(module)
    twin_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    state, own, process = copy.deepcopy(module.state_dict()), of_module(module), of_process()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    for device in (None, "nvidia:sm_90"):
        te.plan(module, *inputs, recipe=used, device=device)
        te.plan(module, *inputs, recipe=used, device=device, backward=False)
    assert same(module.state_dict(), state)
    assert all(p.grad is gradients[n] for n, p in module.named_parameters())
    assert of_module(module) == own
    assert of_process() == process
    for x in inputs:
        x.grad = None
    module.zero_grad()
    twin.zero_grad()
    for _ in range(2):
        torch.manual_seed(1)
        mine = step(module, inputs, used)
        torch.manual_seed(1)
        assert torch.equal(bits(mine), bits(step(twin, twin_inputs, used)))
    assert same(module.state_dict(), twin.state_dict())
    for x, y in zip(inputs, twin_inputs):
        assert x.grad is not None and y.grad is not None and torch.equal(bits(x.grad), bits(y.grad))
    for p, q in zip(module.parameters(), twin.parameters()):
        assert p.grad is not None and q.grad is not None and torch.equal(bits(p.grad), bits(q.grad))


def test_a_plan_that_fails_leaves_nothing_either() -> None:
    class Fails(torch.nn.Module):
        def __init__(self, backward: bool) -> None:
            super().__init__()
            self.layer, self.backward = te.Linear(HIDDEN, HIDDEN), backward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            if not self.backward:
                raise ValueError("in the forward")
            x.register_hook(lambda grad: 1 / 0)
            return y

    recipe = recipes.DelayedScaling()
    x = torch.randn(SEQUENCE, HIDDEN, requires_grad=True)
    for backward in (False, True):
        module = Fails(backward)
        before = of_process()
        with pytest.raises(ZeroDivisionError if backward else ValueError):
            te.plan(module, x, recipe=recipe)
        assert of_process() == before and not module.layer.state_dict()["_extra_state"].numel()


def test_a_plan_inside_a_step() -> None:
    """Between a forward and its backward, and inside an autocast whose updates are due."""
    module, recipe = te.Linear(HIDDEN, HIDDEN), recipes.DelayedScaling(amax_history_len=4)
    twin = copy.deepcopy(module)
    x = torch.randn(SEQUENCE, HIDDEN)
    for layer, plans in ((module, True), (twin, False)):
        for _ in range(2):
            with te.autocast(recipe=recipe):
                y = layer(x)
                if plans:
                    te.plan(layer, x)
            if plans:
                te.plan(layer, x, recipe=recipe)
            y.sum().backward()
    assert same(module.state_dict(), twin.state_dict())


def test_random_states_of_a_tracker_stay() -> None:
    tracker = RngStatesTracker()
    tracker.add("model-parallel-rng", 7)
    layer = te.TransformerLayer(HIDDEN, HIDDEN, 4, get_rng_state_tracker=lambda: tracker)

    class Checkpointed(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return te.checkpoint(self[0], x, get_rng_state_tracker=lambda: tracker)

    before, state = tracker.get_states(), torch.get_rng_state()
    te.plan(layer, te.TensorSpec((SEQUENCE, 1, HIDDEN)))
    assert len(te.plan(Checkpointed(layer), te.TensorSpec((SEQUENCE, 1, HIDDEN)))) > 20
    assert tracker.get_states().keys() == before.keys()
    assert all(tracker.get_states()[name] is before[name] for name in before)
    assert torch.equal(torch.get_rng_state(), state)


def test_main_gradients_stay() -> None:
    layer = te.Linear(HIDDEN, HIDDEN, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones(HIDDEN, HIDDEN)
    layer.weight.grad_added_to_main_grad = False
    main_grads._dummies.clear()
    plan = te.plan(layer, te.TensorSpec((SEQUENCE, HIDDEN)))
    assert [call.facts["accumulate"] for call in plan.backward if call.facts["layout"] == "TN"] == [True]
    assert torch.equal(layer.weight.main_grad, torch.ones(HIDDEN, HIDDEN))
    assert layer.weight.grad_added_to_main_grad is False and layer.weight.grad is None
    assert all(type(dummy) is torch.Tensor for dummy in main_grads._dummies.values())


def test_warnings_are_left_for_the_step(caplog: pytest.LogCaptureFixture) -> None:
    te_dispatch.reload_environment()
    attention = te.DotProductAttention(4, 32, attn_mask_type="no_mask")
    inputs = [torch.randn(SEQUENCE, 2, 4, 32) for _ in range(3)]
    given: Any = {"window_size": (-1, 0)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        te.plan(attention, *inputs, **given)
        assert not said and not caplog.records
        attention(*inputs, **given)
        assert len(said) == 1
    attention = te.DotProductAttention(4, 32, attn_mask_type="no_mask")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        te.plan(attention, *inputs, **given)
        attention(*inputs, **given)
        assert len(said) == 1


def test_observers_are_told_of_no_planned_call() -> None:
    calls: list[str] = []
    module = MODULES["LayerNormMLP"].make()
    with te_dispatch.observe(lambda operator, *_: calls.append(operator.name)):
        plan = te.plan(module, *MODULES["LayerNormMLP"].inputs())
    assert len(plan) and not calls
