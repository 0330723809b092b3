# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Ways to call an operator wrongly, and spaces of calls with one of them each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from te_dispatch.conformance.families import (  # noqa: F401  # whose spaces right calls are taken from
    activation,
    attention,
    attention_bwd,
    gemm,
    gemm_records,
    grouped,
    moe,
    norm,
    position,
    quantize_bookkeeping,
    quantize_casts,
    quantize_forms,
    quantize_many,
    softmax,
    training,
)
from te_dispatch.conformance.families.quantize import bits
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, find

#: Arguments of a right call -> those that make it wrong.
Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Mistake:
    """One way to call an operator wrongly.

    Attributes:
        change: what becomes of a right call's arguments.
        values: of the right call's space, where they are not the first of their axis.
    """

    change: Change
    values: Mapping[str, str] = field(default_factory=dict)


def lengthened(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.cat((x, x.narrow(dim, 0, 1)), dim)


def longer(name: str, dim: int = -1, **values: str) -> Mistake:
    """An operand with one element too many along a dimension."""
    return Mistake(lambda given: {name: lengthened(given[name], dim)}, values)


def given(values: Mapping[str, str] | None = None, /, **arguments: Any) -> Mistake:
    """Arguments that do not go with the others; functions are called with the right ones."""
    return Mistake(
        lambda right: {name: value(right) if callable(value) else value for name, value in arguments.items()},
        values or {},
    )


def item(name: str, change: Callable[[Any], Any]) -> Mistake:
    """The last item of a list becomes another."""
    return Mistake(lambda right: {name: [*right[name][:-1], change(right[name][-1])]})


def short(name: str) -> Mistake:
    """A list without its last item."""
    return Mistake(lambda right: {name: right[name][:-1]})


def _make(base: Space, mistakes: Mapping[str, Mistake], values: Values, maker: Maker) -> Arguments:
    mistake = mistakes[values["mistake"]]
    plain = {axis.name: axis.values[0] for axis in base.axes}
    own = {name: value for name, value in values.items() if name != "mistake"}
    right = base.make({**plain, **own, **mistake.values}, maker)
    return {**right, **mistake.change(right)}


def refused(
    operator: str, base: str, mistakes: Mapping[str, Mistake], name: str = "refused", contents: bool = False
) -> Space:
    """A space of all the mistakes, in the dtypes of the one that it takes right calls from.

    Args:
        contents: only the contents of tensors show them.
    """
    right = find(operator, base)
    dtypes = [axis for axis in right.axes if axis.name == "dtype"]
    return Space(
        operator, name, (Axis("mistake", tuple(mistakes)), *dtypes), functools.partial(_make, right, mistakes), bits,
        raises=ValueError, contents=contents, widen=right.widen, forward=right.forward,
    )  # fmt: skip
