# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which combinations of axis values to run: every pair of values of two axes at least once, or all of them.

`pairwise` covers what a contract allows, `Filler` what one implementation claims of it. Most bugs that need several
options at once need two (Kuhn, Wallace and Gallo, 2004). The greedy construction is that of AETG (Cohen et al., 1997)
without its random choices: the same space gives the same cases on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from te_dispatch.conformance.space import Undecided

#: Axis -> its values.
Axes = Mapping[str, Sequence[str]]
_Pair = tuple[tuple[str, str], tuple[str, str]]
#: Values of some axes that have to occur together in one combination.
Goal = tuple[tuple[str, str], ...]

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


class Filler:
    """Finds combinations that hold given goals among those that a predicate accepts.

    An implementation claims a part of a space that only its requirements describe, so the part is explored: from
    combinations that are known to be accepted, some values are changed and the predicate is asked again.

    Args:
        axes: every value that a combination may take.
        valid: whether the contract allows a combination; cheap, and may be asked about partial ones (`Undecided`).
        refusal: why a valid combination is not accepted, None where it is. It makes a call's arguments: milliseconds.
        accepted: combinations to start from, the plainest first.
        seed: of the choices among equals.
        hidden: the axes of a combination that leave nothing to see of the others' values (`Axis.dull`).
    """

    #: Accepted combinations that are changed to hold a goal before it is taken to be impossible.
    CONTEXTS = 24
    #: Questions to `refusal` for one goal. Where the same refusal comes `CONVINCED` times in a row, it is believed.
    QUESTIONS = 40
    CONVINCED = 8

    def __init__(
        self,
        axes: Axes,
        valid: Callable[[Mapping[str, str]], bool],
        refusal: Callable[[Mapping[str, str]], str | None],
        accepted: Sequence[Mapping[str, str]] = (),
        seed: int = 0,
        hidden: Callable[[Mapping[str, str]], frozenset[str]] = lambda values: frozenset(),
    ) -> None:
        self._axes = axes
        self._hidden = hidden
        self._valid = valid
        self._refusal = refusal
        self._random = random.Random(seed)
        self.accepted: list[dict[str, str]] = [dict(values) for values in accepted]

    def search(self, refused: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
        """Any accepted combination, where none is known yet: values of a refused one are changed, one at a time, as
        long as fewer conditions of the refusal are left."""
        if not refused:
            return None
        values = min((dict(one) for one in refused), key=self._conditions)
        left, better = self._conditions(values), True
        while better:
            better = False
            for name in self._axes:
                for value in self._axes[name]:
                    other = {**values, name: value}
                    if value == values[name] or not self._valid(other):
                        continue
                    conditions = self._conditions(other)
                    if conditions < left:
                        values, left, better = other, conditions, True
                    if not left:
                        self.accept(values)
                        return values
        return None

    def _conditions(self, values: Mapping[str, str]) -> int:
        """How many conditions refuse a combination: dispatch tells all of them, parted by semicolons."""
        why = self._refusal(values)
        return 0 if why is None else 1 + why.count("; ")

    def accept(self, values: Mapping[str, str]) -> None:
        """Start from a combination, too; not from one with values beyond the axes', which are rare on purpose."""
        if all(values[name] in known for name, known in self._axes.items()):
            self.accepted.append(dict(values))

    def find(self, goal: Goal, shown: bool = False) -> dict[str, str] | None:
        """An accepted combination that holds a goal, and shows what it does with it where that is asked for; None if
        none was found. Does not add it to `accepted`."""
        wanted = dict(goal)
        if not self._possible(wanted):
            return None
        asked, same, last = 0, 0, None
        for values in self._around(wanted, shown):
            why = self._refusal(values)
            if why is None:
                return values
            asked, same, last = asked + 1, same + 1 if why == last else 1, why
            if asked >= self.QUESTIONS or same >= self.CONVINCED:
                return None
        return None

    def improved(self, values: dict[str, str], goal: Goal, gain: Callable[[Mapping[str, str]], int]) -> dict[str, str]:
        """The same, with values outside the goal changed one axis at a time where that covers more and hides no more
        of what becomes of the goal."""
        held, best = dict(goal), gain(values)
        hidden = self._hidden(values) - held.keys()
        for name in self._axes:
            if name in held:
                continue
            others = [{**values, name: value} for value in self._axes[name] if value != values[name]]
            scored = sorted(((gain(other), n) for n, other in enumerate(others)), key=lambda pair: (-pair[0], pair[1]))
            for score, n in scored[:2]:
                if score <= best or not self._hidden(others[n]) - held.keys() <= hidden:
                    continue
                if self._valid(others[n]) and self._refusal(others[n]) is None:
                    values, best = others[n], score
                    break
        return values

    def neighbour(self) -> dict[str, str] | None:
        """A random accepted combination: one that is known with a third of its values drawn anew."""
        values = dict(self._random.choice(self.accepted))
        for name in self._random.sample(list(self._axes), max(1, len(self._axes) // 3)):
            values[name] = self._random.choice(self._axes[name])
        return values if self._valid(values) and self._refusal(values) is None else None

    def _around(self, wanted: Mapping[str, str], shown: bool) -> Iterator[dict[str, str]]:
        """Valid combinations that hold `wanted`, those nearest to accepted ones first, none twice; `shown`: those alone
        in which no other axis hides what becomes of it."""
        seen: set[tuple[str, ...]] = set()

        def fresh(values: dict[str, str]) -> bool:
            key = tuple(values.values())
            if key in seen or (shown and not self._hidden(values) <= wanted.keys()) or not self._valid(values):
                return False
            seen.add(key)
            return True

        known_ones = [one for one in self.accepted if not shown or self._hidden(one) <= wanted.keys()]
        changes = {id(known): sum(known.get(n) != v for n, v in wanted.items()) for known in known_ones}
        contexts = sorted(known_ones, key=lambda known: changes[id(known)])[: self.CONTEXTS]
        for known in contexts:
            values = {**known, **wanted}
            if fresh(values):
                yield values
        for known in contexts[:6]:
            for name in self._axes:
                for value in self._axes[name] if name not in wanted else ():
                    values = {**known, **wanted, name: value}
                    if fresh(values):
                        yield values
        values_or_none = _complete(self._axes, self._valid, dict(wanted), {})
        if values_or_none is not None and fresh(values_or_none):
            yield values_or_none

    def _possible(self, wanted: Mapping[str, str]) -> bool:
        try:
            return self._valid(_Partial(dict(wanted), self._axes))
        except Undecided:
            return True
