# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Capture and replay of autograd Functions: what is repeated, what is refused, and what `capture_stats` says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.pytorch.autograd.scoped import in_forward_scope
from te_dispatch.pytorch.capture.functions import Replayable, replayed
from te_dispatch.pytorch.capture.program import Program
from te_dispatch.pytorch.step import step

from .capturing import RECIPES, made, state_of
from .capturing import step as train

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Options(Replayable):
    def __init__(self, compute: Compute, gradient: Compute) -> None:
        super().__init__()
        self.compute = compute
        self.gradient = gradient
        self.ran: list[str] = []


@replayed(in_forward_scope)
class Function(torch.autograd.Function):
    """compute(x, w), with the gradient gradient(dy, w) of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, options: Options) -> torch.Tensor:
        options.ran.append("forward")
        ctx.scope, ctx.options = scopes.capture(), options
        ctx.save_for_backward(x, w)
        return options.compute(x, w)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.options.ran.append("backward")
        _, w = ctx.saved_tensors
        return ctx.options.gradient(dy, w), None, None


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ops.gemm(x, w, layout="NN").out  # type: ignore[return-value]


def captured(compute: Compute = product, gradient: Compute = product) -> Options:
    """Options of a call that was made once, forward and backward."""
    options, kept = Options(compute, gradient), []
    options.capture = kept.append
    run(options, 0)
    assert options.capture is None and len(kept) == 1
    assert options.ran[:2] == ["forward", "backward"]
    kept[0].ran.clear()
    return kept[0]  # type: ignore[no-any-return]


def run(options: Options, seed: int, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(8, 8, generator=generator).requires_grad_(), torch.randn(8, 8, generator=generator)
    out = Function.apply(x, w, options)
    out.backward(torch.randn(8, 8, generator=generator) if dy is None else dy)
    assert x.grad is not None
    return out.detach(), x.grad


def equal_to_plain(options: Options, seed: int = 1, dy: torch.Tensor | None = None) -> bool:
    plain = run(Options(options.compute, options.gradient), seed, dy)
    return all(map(torch.equal, run(options, seed, dy), plain))


@pytest.mark.parametrize(
    "compute",
    [
        product,
        lambda x, w: product(x.t().contiguous(), w),
        lambda x, w: product(x.view(4, 16).view(8, 8), w.to(torch.float64).to(torch.float32)),
        lambda x, w: torch.stack(product(x, w).unbind(1), 1),
        lambda x, w: product(product(x, w), w) + product(w, x),
        lambda x, w: x.view_as(x),
    ],
    ids=["operator", "transposed", "views and casts", "parts", "several", "input"],
)
def test_a_replay_has_the_bits_of_the_plain_function(compute: Compute) -> None:
    options = captured(compute)
    assert options.program is not None and options.program.backwards
    found = run(options, 1)
    assert options.ran == []
    assert all(map(torch.equal, found, run(Options(compute, product), 1)))


def _random(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(x, torch.rand(8, 8))


def _in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(x, w).mul_(2.0)


def _of_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(x, w) if float(w.sum()) > 0 else product(w, x)


_HELD = torch.ones(8, 8)


def _constant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return product(x, _HELD)


@pytest.mark.parametrize("compute", [_random, _in_place, _of_data, _constant])
def test_whatever_is_no_step_keeps_to_the_plain_path(compute: Compute) -> None:
    te.capture_stats(reset=True)
    torch.manual_seed(0)
    options = captured(compute)
    assert options.program is None
    assert [why.partition(":")[0] for why in te.capture_stats().refusals] == ["forward"]
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = run(options, seed)
        torch.manual_seed(seed)
        assert all(map(torch.equal, found, run(Options(compute, product), seed)))


def test_a_backward_that_cannot_be_repeated_is_plain_behind_a_replayed_forward() -> None:
    te.capture_stats(reset=True)
    options = captured(product, _of_data)
    assert options.program is not None and options.program.backwards == []
    assert all(equal_to_plain(options, seed) for seed in range(6))
    assert options.ran == ["backward"] * 6
    (why,) = te.capture_stats().refusals
    assert why.startswith("backward: ") and "float" in why


def test_one_tensor_given_twice_is_no_capture() -> None:
    options, kept = Options(product, product), []
    options.capture = kept.append
    x = torch.randn(8, 8, requires_grad=True)
    Function.apply(x, x, options)
    assert kept[0].program is None
    assert any("given twice" in why for why in te.capture_stats().refusals)


def test_gradients_of_each_form_have_a_backward_of_their_own() -> None:
    options = captured()
    forms = [torch.randn(8, 8), torch.randn(8, 8).t(), torch.ones(()).expand(8, 8), torch.randn(8, 16)[:, :8]]
    for _ in range(2):
        assert all(equal_to_plain(options, 3, form) for form in forms)
    assert isinstance(options.program, Program) and len(options.program.backwards) == 4
    assert options.ran == ["backward"] * 3
    assert equal_to_plain(options, 4, torch.randn(8, 24)[:, :8]), "a fifth form"
    assert options.ran == ["backward"] * 4


def test_an_input_that_wants_no_gradient_is_another_call() -> None:
    options = captured()
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    Function.apply(x, w, options).sum().backward()
    assert options.ran == ["forward", "backward"]


def test_a_step_is_repeated_and_not_looked_into() -> None:
    seen: list[str] = []

    @step
    def noted(x: torch.Tensor, word: list[str]) -> torch.Tensor:
        seen.append(word[0])
        return x * torch.rand(())  # PyTorch's functions in it are its own

    options = captured(lambda x, w, word=["a"]: product(noted(x, word), w))  # one object for all calls
    assert options.program is not None
    torch.manual_seed(0)
    first = run(options, 1)[0]
    torch.manual_seed(0)
    assert torch.equal(run(options, 1)[0], first) and seen == ["a"] * 3
    torch.manual_seed(1)
    assert not torch.equal(run(options, 1)[0], first)


def test_temporaries_are_freed_where_the_last_step_has_read_them() -> None:
    alive: list[bool] = []
    last: list[weakref.ref[torch.Tensor]] = []

    @step
    def make(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        last.append(weakref.ref(made))
        return made

    @step
    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(last[-1]() is not None)
        return x + 1

    options = captured(lambda x, w: look(product(make(x), w)))
    alive.clear()
    run(options, 1)
    assert options.ran == [] and alive == [False]


def test_a_program_keeps_no_tensor_of_a_call() -> None:
    options, kept = Options(product, product), []
    options.capture = kept.append
    x, w, dy = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8), torch.randn(8, 8)
    out = Function.apply(x, w, options)
    out.backward(dy)
    assert kept[0].program is not None
    watched = [weakref.ref(tensor) for tensor in (x, w, dy, out, x.grad)]
    del x, w, dy, out
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_the_statistics_tell_of_hits_and_of_why_calls_were_not_replayed() -> None:
    module = made("Linear")
    te.capture_stats(reset=True)
    for seed in range(3):
        train(module, RECIPES["delayed"], seed)
    stats = te.capture_stats()
    assert (stats.hits, stats.captures, dict(stats.misses)) == (2, 2, {"new signature": 1})
    x = torch.randn(32, 1, 64)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        module(x)
    checkpoint(module, x.requires_grad_(), use_reentrant=True)
    misses = te.capture_stats().misses
    assert misses["checkpoint"] == misses["torch.autocast"] == misses["hooks on saved tensors"] == 1
    module(torch.randn(64, 64))
    assert te.capture_stats(reset=True).misses["new signature"] == 2
    assert te.capture_stats() == te.CaptureStats()


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_inference_is_replayed(name: str, recipe: str, block: Callable[[], Any]) -> None:
    module = made(name)
    for seed in range(2):
        train(module, RECIPES[recipe], seed)
    before = state_of(module)
    te.capture_stats(reset=True)
    outputs = []
    for step_ in range(3):
        x = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(5))
        with block(), te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            outputs.append(module(x))
        assert te.capture_stats().hits == step_
    assert te.capture_stats().captures == 1
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    for a, b in zip(before, state_of(module), strict=True):  # nothing was recorded
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    train(module, RECIPES[recipe], 3)
    assert te.capture_stats().hits == 3  # training goes on as it was


def test_a_part_of_a_result_goes_while_another_stays() -> None:
    """A cast's copies must not stay for the sake of the bias gradient that came with them."""
    parts: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    @step
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = x * 0.5, x * 0.25, x * 0.125
        parts[:] = [weakref.ref(part) for part in made]
        return made

    @step
    def look(x: torch.Tensor) -> torch.Tensor:
        alive[:] = [part() is not None for part in parts]
        return x + 1

    def gradient(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second, _ = halves(dy)
        product = ops.gemm(first, w, layout="NN").out
        del first, _
        assert product is not None
        return ops.gemm(look(product), second, layout="NN").out  # type: ignore[return-value]

    options = captured(gradient=gradient)
    assert alive == [True, True, True]  # what is recorded stays until it was
    run(options, 1)
    assert options.ran == [] and alive == [False, True, False]
    assert equal_to_plain(options)
