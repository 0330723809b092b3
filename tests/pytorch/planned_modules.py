# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules with inputs, and what a step of one calls, for tests of plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe as recipes
from te_dispatch.core.decision import Accepted
from te_dispatch.core.module_plan import PlannedCall
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.arguments import resolve_device

HIDDEN, HEADS, SEQUENCE, BATCH = 128, 4, 32, 2

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "block": recipes.Float8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


class Example(NamedTuple):
    """A module's constructor, and the shapes of its inputs."""

    make: Callable[[], torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((SEQUENCE, BATCH, HIDDEN),)

    def inputs(self) -> list[torch.Tensor]:
        device = resolve_device(None)
        return [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for shape in self.shapes]


_BF16: dict[str, Any] = {"params_dtype": torch.bfloat16}
_HEAD = (SEQUENCE, BATCH, HEADS, HIDDEN // HEADS)

MODULES: dict[str, Example] = {
    "Linear": Example(lambda: te.Linear(HIDDEN, 2 * HIDDEN, **_BF16)),
    "Linear, divided": Example(lambda: te.Linear(HIDDEN, 3 * HIDDEN, parameters_split=("q", "k", "v"), **_BF16)),
    "LayerNormLinear": Example(lambda: te.LayerNormLinear(HIDDEN, HIDDEN, bias=False, **_BF16)),
    "LayerNormMLP": Example(lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **_BF16)),
    "LayerNorm": Example(lambda: te.LayerNorm(HIDDEN, **_BF16)),
    "RMSNorm": Example(lambda: te.RMSNorm(HIDDEN, **_BF16)),
    "DotProductAttention": Example(lambda: te.DotProductAttention(HEADS, HIDDEN // HEADS), (_HEAD,) * 3),
    "MultiheadAttention": Example(lambda: te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, **_BF16)),
    "TransformerLayer": Example(lambda: te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, **_BF16)),
    "Sequential": Example(
        lambda: te.Sequential(te.LayerNormLinear(HIDDEN, HIDDEN, **_BF16), te.LayerNormMLP(HIDDEN, HIDDEN, **_BF16))
    ),
}


def region(recipe: recipes.Recipe | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


def step(module: torch.nn.Module, inputs: list[torch.Tensor], recipe: recipes.Recipe | None) -> torch.Tensor:
    """A forward and a backward, of a gradient like those that follow a loss."""
    with region(recipe):
        out = module(*inputs)
    out.backward(torch.ones_like(out))
    return out


Seen = list[tuple[str, str, Mapping[str, Any]]]


def observed(run: Callable[[], Any]) -> Seen:
    """The operator calls that `run` makes: name, implementation with a composite's pieces, facts."""
    calls: Seen = []

    def note(operator: Any, accepted: Accepted, args: tuple[Any, ...], result: Any) -> None:
        calls.append((operator.name, choice(accepted), MANAGER.call_facts(operator, args)))

    with te_dispatch.observe(note):
        run()
    return calls


def choice(accepted: Accepted) -> str:
    pieces = [f"{name}={choice(piece.chosen)}" for name, piece in accepted.pieces.items() if piece.chosen is not None]
    return f"{accepted.id}({', '.join(pieces)})" if pieces else accepted.id


def planned(calls: Any) -> Seen:
    """The same of a plan."""
    found: Seen = []
    for call in calls:
        assert isinstance(call, PlannedCall)
        found.append((call.operator, call.choice, call.facts))
    return found
