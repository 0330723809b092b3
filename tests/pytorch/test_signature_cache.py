# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of many input signatures: each takes the fast path once it was seen, and the least recently used is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch.attention import function as attention_function
from te_dispatch.pytorch.capture.signatures import MAX_SIGNATURES, SignatureCache
from te_dispatch.pytorch.modules import layernorm_mlp, layernorm_mlp_function, linear_module, linear_steps

from .capturing import MODULES, RECIPES, made, step

RECIPE = RECIPES["delayed"]


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the forwards and backwards that took the slow path."""
    taken: list[str] = []

    def watched(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            taken.append(what)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watched(linear_module.LinearModule, "_prepared", "forward")
    watched(layernorm_mlp.LayerNormMLP, "_run", "forward")
    watched(te.DotProductAttention, "_attend", "forward")
    watched(linear_steps, "product_gradients", "backward")
    watched(layernorm_mlp_function, "_gradients", "backward")
    watched(attention_function.ops, "attention_bwd", "backward")
    return taken


def test_the_least_recently_used_is_evicted() -> None:
    cache, shapes = SignatureCache(), [torch.Size((number,)) for number in range(MAX_SIGNATURES // 2 + 1)]
    for number in range(MAX_SIGNATURES):
        cache.add(shapes[number // 2], number)
    assert len(cache) == MAX_SIGNATURES and list(cache)[:3] == [
        MAX_SIGNATURES - 1,
        MAX_SIGNATURES - 2,
        MAX_SIGNATURES - 3,
    ]
    cache.use(shapes[0], 1)
    assert list(cache)[:2] == [0, 1] and cache.by_shape[shapes[0]] is cache.recent
    cache.add(shapes[-1], "new")
    assert len(cache) == MAX_SIGNATURES and list(cache)[:3] == ["new", 0, 1] and list(cache)[-2:] == [4, 3]
    cache.add(shapes[-1], "newer")
    assert len(cache) == MAX_SIGNATURES and shapes[1] not in cache.by_shape


def test_entries_of_one_shape_are_evicted_too() -> None:
    cache, shape = SignatureCache(), torch.Size((3, 4))
    for number in range(MAX_SIGNATURES):
        cache.add(shape, number)
    cache.use(shape, MAX_SIGNATURES - 1)
    cache.add(shape, "new")
    assert len(cache) == MAX_SIGNATURES and list(cache)[:2] == ["new", 0] and list(cache)[-1] == 2


def test_what_another_thread_has_taken_is_left_alone() -> None:
    cache, shape = SignatureCache(), torch.Size((3, 4))
    cache.add(shape, "one")
    entries = cache.by_shape.pop(shape)
    cache.use(shape, 0)
    assert not len(cache)
    cache.by_shape[shape] = entries
    cache.use(shape, 5)
    assert list(cache) == ["one"]


def test_a_full_cache_captures_some_of_what_it_misses() -> None:
    cache = SignatureCache()
    for number in range(MAX_SIGNATURES):
        assert cache.admits()
        cache.add(torch.Size((number,)), number)
    assert 0 < sum(cache.admits() for _ in range(100)) < 20


def _rows(module: torch.nn.Module, rows: int, recipe: Any) -> None:
    x = torch.randn(rows, 64, requires_grad=True)
    with nullcontext() if recipe is None else te.autocast(recipe=recipe):
        out = module(x)
    out.backward(torch.randn_like(out))


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("name", ["Linear", "Linear of three", "LayerNormLinear", "LayerNormMLP"])
def test_every_length_takes_the_fast_path_once_it_was_seen(name: str, recipe: str, slow_calls: list[str]) -> None:
    module = made(name)
    lengths = range(32, 32 * 13, 32)
    for _ in range(2):  # the backward of the very first step is seen in the second
        for rows in lengths:
            _rows(module, rows, RECIPES[recipe])
    slow_calls.clear()
    for rows in (*lengths, *reversed(lengths)):
        _rows(module, rows, RECIPES[recipe])
    assert slow_calls == []
    assert len(module.captured_calls.signatures) == len(lengths)


def test_every_length_of_attention_takes_the_fast_path(slow_calls: list[str]) -> None:
    module = te.DotProductAttention(2, 8, attention_dropout=0.0)

    def run(length: int) -> None:
        x = torch.randn(length, 1, 2, 3, 8, requires_grad=True)
        module(qkv_layer=x, qkv_interleave_dim=-2).backward(torch.ones(length, 1, 16))

    for _ in range(2):
        for length in range(2, 12):
            run(length)
    slow_calls.clear()
    for length in range(2, 12):
        run(length)
    assert slow_calls == [] and len(module._signatures) == 10


def test_more_lengths_than_are_kept_cost_no_memory() -> None:
    module = made("Linear")
    for rows in range(1, 2 * MAX_SIGNATURES):
        _rows(module, rows, None)
    assert len(module.captured_calls.signatures) == MAX_SIGNATURES
    for _ in range(20):  # one that comes again is kept in the end, and those that do not are evicted
        _rows(module, 1000, None)
    first = next(iter(module.captured_calls.signatures))
    _rows(module, 1000, None)
    assert next(iter(module.captured_calls.signatures)) is first


def _expanded(out: torch.Tensor) -> torch.Tensor:
    return torch.full((), 0.5).expand_as(out)


def _transposed(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(*reversed(out.shape), generator=torch.Generator().manual_seed(1)).permute(
        *range(out.dim())[::-1]
    )


def _trained(
    module: torch.nn.Module, x: torch.Tensor, gradient: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Results of a step with a gradient of some form."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=RECIPE):
        out = module(x)
    out.backward(gradient(out))
    yield from (out.detach(), x.grad, *(p.grad.clone() for p in module.parameters()))


@pytest.mark.parametrize("first", ["contiguous", "same"])
@pytest.mark.parametrize("form", [_expanded, _transposed])
@pytest.mark.parametrize("name", [name for name in MODULES if "returning" not in name and "passing" not in name])
def test_gradients_with_other_strides_take_the_fast_path(
    name: str, form: Callable[[torch.Tensor], torch.Tensor], first: str, slow_calls: list[str]
) -> None:
    """Whether the first gradient was contiguous or not; they have the bits of a contiguous one."""
    module, twin = made(name), made(name)
    inputs = torch.randn(5, 32, 1, 64, generator=torch.Generator().manual_seed(0))
    for number, x in enumerate(inputs):
        if number == 3:
            slow_calls.clear()
        plain = number == 0 and first == "contiguous"
        found = list(_trained(module, x, (lambda out: form(out).contiguous()) if plain else form))
        if number >= 3:
            assert slow_calls == []
        expected = list(_trained(twin, x, lambda out: form(out).contiguous()))
        slow_calls.clear()
        assert all(map(torch.equal, found, expected))


def test_a_cache_that_was_replaced_is_not_written_to() -> None:
    """A thread may capture a call while another invalidates the cache."""
    module = made("Linear")
    step(module, RECIPE, 0)
    old = module.captured_calls.signatures
    assert old
    module.save_original_input = True
    assert not module.captured_calls.signatures and module.captured_calls.signatures is not old
