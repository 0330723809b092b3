# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which combinations of axis values to run: every pair of values of two axes at least once, or all of them.

Most bugs that need several options at once need two (Kuhn, Wallace and Gallo, 2004). The greedy construction is that
of AETG (Cohen et al., 1997) without its random choices: the same space gives the same cases on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from te_dispatch.conformance.space import Undecided

#: Axis -> its values.
Axes = Mapping[str, Sequence[str]]
_Pair = tuple[tuple[str, str], tuple[str, str]]

#: Completions tried for one pair before it is taken to be impossible.
_TRIES = 4096


def product(axes: Axes, valid: Callable[[Mapping[str, str]], bool]) -> Iterator[dict[str, str]]:
    """Every valid combination."""
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination))
        if valid(values):
            yield values


class _Partial(dict[str, str]):
    """Some axes' values, for a predicate written for all: asking for another axis raises `Undecided`."""

    def __init__(self, values: Mapping[str, str], axes: Axes) -> None:
        super().__init__(values)
        self._axes = axes

    def __missing__(self, name: str) -> str:
        raise Undecided(name) if name in self._axes else KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._axes else default

    def __contains__(self, name: object) -> bool:
        return name in self._axes

    def _all(self, *_: Any) -> Any:
        raise Undecided("all axes")

    __iter__ = items = values = keys = _all


def pairwise(axes: Axes, valid: Callable[[Mapping[str, str]], bool]) -> list[dict[str, str]]:
    """Valid combinations that together hold every pair of values that any valid combination holds.

    The first is the plainest: the first value of every axis, where that is valid.
    """
    names = list(axes)
    if len(names) < 2:
        return list(product(axes, valid))
    uncovered: dict[_Pair, None] = {}
    for one, other in itertools.combinations(names, 2):
        for first, second in itertools.product(axes[one], axes[other]):
            uncovered[((one, first), (other, second))] = None
    found: list[dict[str, str]] = []
    while uncovered:
        pair = next(iter(uncovered))
        values = _complete(axes, valid, dict(pair), uncovered)
        if values is None:
            del uncovered[pair]
            continue
        found.append(values)
        for covered in itertools.combinations(values.items(), 2):
            uncovered.pop(covered, None)
    return found


def _complete(
    axes: Axes, valid: Callable[[Mapping[str, str]], bool], fixed: dict[str, str], uncovered: Mapping[_Pair, None]
) -> dict[str, str] | None:
    """A valid combination with `fixed`, that covers many new pairs; None if none was found."""
    free = [name for name in axes if name not in fixed]
    position = {name: index for index, name in enumerate(axes)}
    tries = 0

    def possible(chosen: dict[str, str]) -> bool:
        try:
            return valid(_Partial(chosen, axes))
        except Undecided:
            return True

    def extend(chosen: dict[str, str], depth: int) -> dict[str, str] | None:
        nonlocal tries
        if depth == len(free):
            tries += 1
            values = {name: chosen[name] for name in axes}
            return values if valid(values) else None
        name = free[depth]
        gains = {value: _gain(chosen, name, value, position, uncovered) for value in axes[name]}
        for value in sorted(axes[name], key=lambda value: -gains[value]):
            further = {**chosen, name: value}
            result = extend(further, depth + 1) if possible(further) else None
            if result is not None or tries >= _TRIES:
                return result
        return None

    return extend(fixed, 0) if possible(fixed) else None


def _gain(
    chosen: Mapping[str, str], name: str, value: str, position: Mapping[str, int], uncovered: Mapping[_Pair, None]
) -> int:
    own, at = (name, value), position[name]
    return sum(((other, own) if position[other[0]] < at else (own, other)) in uncovered for other in chosen.items())
