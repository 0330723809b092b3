# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activation recompute under delayed scaling: bitwise equal to no checkpoint, whatever the mode and the order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_dispatch.pytorch.recompute.checkpoint import use_reentrant_activation_recompute

RECIPE = DelayedScaling(amax_history_len=3)


class Block(torch.nn.Module):
    """Two different modules, one of which is called twice, so that positions matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = te.LayerNormLinear(32, 32, device="cpu")
        self.mlp = te.LayerNormMLP(32, 64, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.first(torch.tanh(self.first(x))))


Runner = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def _plain(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _native(use_reentrant: bool) -> Runner:
    return lambda module, x: torch_checkpoint.checkpoint(module, x, use_reentrant=use_reentrant)


def _ours(use_reentrant: bool) -> Runner:
    return lambda module, x: te.checkpoint(module, x, use_reentrant=use_reentrant)


def _nested(outer: bool, inner: bool) -> Runner:
    def run(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        def twice(y: torch.Tensor) -> torch.Tensor:
            # In one inner region: in two, a reentrant backward would add the gradients in another order.
            return module.first(torch.tanh(module.first(y)))

        def body(y: torch.Tensor) -> torch.Tensor:
            return module.mlp(torch_checkpoint.checkpoint(twice, y, use_reentrant=inner))

        return torch_checkpoint.checkpoint(body, x, use_reentrant=outer)

    return run


CHECKPOINTS: dict[str, Runner] = {
    "torch-reentrant": _native(True),
    "torch-nonreentrant": _native(False),
    "te-reentrant": _ours(True),
    "te-nonreentrant": _ours(False),
}
NESTED: dict[str, Runner] = {
    f"nested-{'r' if outer else 'n'}{'r' if inner else 'n'}": _nested(outer, inner)
    for outer in (True, False)
    for inner in (True, False)
}


def _inside(run: Runner, recipe: Recipe) -> Runner:
    """The autocast inside the checkpointed function."""

    class Wrapped(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe=recipe):
                return self.module(x)

    return lambda module, x: run(Wrapped(module), x)


def _outside(run: Runner, recipe: Recipe) -> Runner:
    def outer(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return run(module, x)

    return outer


def _train(run: Runner, order: str, steps: int = 3) -> list[torch.Tensor]:
    """Everything that could differ: outputs, gradients and scaling state, over several optimizer steps."""
    torch.manual_seed(7)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        batches = [(torch.randn(16, 32) * 3).requires_grad_() for _ in range(2)]
        outputs = []
        for x in batches:
            outputs.append(run(model, x))
            if order == "1f1b":
                outputs[-1].square().sum().backward()
        pending = {"1f1b": [], "fifo": [0, 1], "lifo": [1, 0]}[order]
        for i in pending:
            outputs[i].square().sum().backward()
        found += [y.detach() for y in outputs] + [x.grad for x in batches]
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + _state(model)


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    tensors = []
    for name, extra in sorted(model.state_dict().items()):
        if name.endswith("_extra_state"):
            tensors.append(extra)
    return tensors


def _assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max()}"


@pytest.mark.parametrize("order", ["1f1b", "fifo", "lifo"])
@pytest.mark.parametrize("place", [_inside, _outside], ids=["inside", "outside"])
@pytest.mark.parametrize("kind", list(CHECKPOINTS))
def test_bitwise_equal_to_no_checkpoint(kind: str, place: Any, order: str) -> None:
    expected = _train(place(_plain, RECIPE), order)
    _assert_same(_train(place(CHECKPOINTS[kind], RECIPE), order), expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("order", ["1f1b", "lifo"])
@pytest.mark.parametrize("kind", list(NESTED))
def test_checkpoint_inside_checkpoint(kind: str, order: str) -> None:
    expected = _train(_outside(_plain, RECIPE), order, steps=2)
    _assert_same(_train(_outside(NESTED[kind], RECIPE), order, steps=2), expected)


@pytest.mark.parametrize("kind", list(CHECKPOINTS))
def test_recipe_without_state_is_replayed_after_its_autocast(kind: str) -> None:
    recipe = Float8CurrentScaling()
    expected = _train(_outside(_plain, recipe), "fifo", steps=1)
    _assert_same(_train(_outside(CHECKPOINTS[kind], recipe), "fifo", steps=1), expected)


@pytest.mark.parametrize("kind", list(CHECKPOINTS))
def test_high_precision_region_stays_in_high_precision(kind: str) -> None:
    """Nothing was quantized in the region, and a quantized call of the same module elsewhere changes nothing."""
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(16, 32, requires_grad=True)
    y = CHECKPOINTS[kind](model, x)
    with te.autocast(recipe=RECIPE):
        model(x.detach())
    y.sum().backward()
    checkpointed, x.grad = x.grad, None
    model(x).sum().backward()
    assert torch.equal(checkpointed, x.grad)


@pytest.mark.parametrize("kind", ["torch-nonreentrant", "te-nonreentrant"])
def test_retained_graph_recomputes_alike(kind: str) -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        y = CHECKPOINTS[kind](model, x)
        z = model(x * 2)  # another forward, so that scales move on at the exit
    del z
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    scales = [m.fp8_state.scales.backward.scale.clone() for m in (model.first, model.mlp)]
    with torch.no_grad():  # the gradients' scales moved on after the first backward: put them back
        for m, scale in zip((model.first, model.mlp), scales):
            m.fp8_state.scales.backward.scale.fill_(1.0)
            m.fp8_state.scales.backward.updated()
            assert not torch.equal(scale, m.fp8_state.scales.backward.scale)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


def test_dropped_graph_leaves_the_next_call_alone() -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(16, 32, requires_grad=True)
    run = CHECKPOINTS["torch-nonreentrant"]
    with te.autocast(recipe=RECIPE):
        run(model, x * 5)
    with te.autocast(recipe=RECIPE):
        y = run(model, x)
    y.sum().backward()
    got = x.grad
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(16, 32, requires_grad=True)
    for factor in (5, 1):
        with te.autocast(recipe=RECIPE):
            y = model(x * factor)
    y.sum().backward()
    assert torch.equal(got, x.grad)


def test_recompute_writes_no_amax() -> None:
    torch.manual_seed(0)
    model = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        y = te.checkpoint(model, x, use_reentrant=False)
    history, scale = model.fp8_state.scales.forward.history.clone(), model.fp8_state.scales.forward.scale.clone()
    assert history[0].eq(0).all() and history[-1].gt(0).all()
    y.sum().backward()
    assert torch.equal(model.fp8_state.scales.forward.history, history)
    assert torch.equal(model.fp8_state.scales.forward.scale, scale)


class _Foreign(torch.autograd.Function):
    """A checkpoint that this project knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), dy)
        return x.grad, None


@pytest.mark.parametrize("inside", [False, True])
def test_unknown_checkpoint_is_refused_by_name(inside: bool) -> None:
    model = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)

    def run(y: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE) if inside else contextlib.nullcontext():
            return model(y)

    with contextlib.nullcontext() if inside else te.autocast(recipe=RECIPE):
        out = _Foreign.apply(x, run)
    with pytest.raises(RuntimeError, match=r"te_dispatch\.pytorch\.checkpoint"):
        out.sum().backward()


def test_interrupted_backward_does_not_block_later_updates() -> None:
    model = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32, requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("interrupted")

    handle = x.register_hook(fail)
    with te.autocast(recipe=RECIPE):
        y = model(x)
    with pytest.raises(ValueError, match="interrupted"):
        y.sum().backward()
    handle.remove()
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            y = model(x)
        y.sum().backward()
    assert model.fp8_state.scales.backward.history[0].eq(0).all()
    assert model.fp8_state.scales.backward.scale.ne(1).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_replays_cached_weights(use_reentrant: bool) -> None:
    def run(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = te.Linear(32, 32, device="cpu")
        found = []
        for _ in range(2):
            for first in (True, False):
                x = torch.randn(16, 32, requires_grad=True)
                with te.autocast(recipe=RECIPE):
                    if checkpointed:
                        y = te.checkpoint(model, x, is_first_microbatch=first, use_reentrant=use_reentrant)
                    else:
                        y = model(x, is_first_microbatch=first)
                y.sum().backward()
                found += [y.detach(), x.grad, model.weight.grad.clone()]
        return found + _state(model)

    _assert_same(run(True), run(False))


def test_policy_scope_of_the_first_forward_is_replayed() -> None:
    from te_dispatch.core import scopes

    seen: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(scopes.capture())
        return x * 2

    x = torch.randn(4, requires_grad=True)
    with scopes.using(prefer={"gemm": "reference"}):
        y = te.checkpoint(body, x, use_reentrant=False)
        # x * 2 saves nothing, so a square makes the recomputation happen
        z = te.checkpoint(lambda v: body(v) ** 2, x, use_reentrant=True)
    (y.sum() + z.sum()).backward()
    assert len(seen) >= 3
    assert all(token is seen[0] for token in seen)
    assert seen[0] is not scopes.capture()


@pytest.mark.parametrize(
    ("kwargs", "error", "name"),
    [
        ({"distribute_saved_activations": True, "use_reentrant": False}, ValueError, "distribute_saved_activations"),
        ({"use_reentrant": True, "determinism_check": "none"}, ValueError, "determinism_check"),
    ],
)
def test_checkpoint_refuses_what_it_cannot_do(kwargs: dict[str, Any], error: type[Exception], name: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(error, match=name):
        te.checkpoint(lambda v: v * 2, x, **kwargs)


def test_the_last_checkpoint_tells_how_it_recomputes() -> None:
    x = torch.randn(4, requires_grad=True)
    for use_reentrant in (False, True):
        te.checkpoint(torch.sin, x, use_reentrant=use_reentrant)
        assert use_reentrant_activation_recompute() is use_reentrant


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, RECIPE])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_bias_that_a_checkpointed_module_returns(kind: str, recipe: Recipe | None, use_reentrant: bool) -> None:
    """A reentrant checkpoint made the parameter its own result: no leaf any more, and recomputed without end."""

    def step(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = getattr(te, kind)(32, 32, return_bias=True, device="cpu")
        calls = []

        def function(x: torch.Tensor) -> Any:
            calls.append(x)
            assert len(calls) < 5
            return module(x)

        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out, bias = run(function, x)
        (out + bias).square().sum().backward()
        parameters = list(module.parameters())
        assert all(parameter.is_leaf for parameter in parameters)
        assert x.grad is not None
        return [out.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)]

    plain = step(lambda function, x: function(x))
    checkpointed = step(lambda function, x: te.checkpoint(function, x, use_reentrant=use_reentrant))
    assert len(plain) == len(checkpointed) and all(map(torch.equal, plain, checkpointed))
