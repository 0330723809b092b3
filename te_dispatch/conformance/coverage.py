# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What each implementation claims of a space, and whether all of that was run.

A *goal* is a set of axis values that one judged case must hold together. Level ``full`` has a goal for every pair of
values of two axes, for every combination of a group of axes (`Space.together`), for every pair within parts of the
space (`Space.within`), for every ``once`` value, and for every fixed case, with the plainest values of the axes that it
leaves out where that is claimed. The goals of an implementation are those that some case which it claims holds: what it
claims is asked of dispatch (`Subject.claim`), so a goal is not a matter of what was planned. A goal that no judged case
holds is *claimed but never run*, and there is no certificate while there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_dispatch.conformance import transfer
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.covering import Filler, Goal
from te_dispatch.conformance.maker import Sketch
from te_dispatch.conformance.space import Space, Values
from te_dispatch.conformance.subject import Claim, Subject

#: Where a rejection cannot depend on the call: no case of the implementation is claimed on this device.
_HOPELESS = ("device", "backend", "bind")
#: A goal that so many declined cases hold, and no judged one, counts as refused.
DECLINED = 3
#: Cases that level full adds for triples of axes, as a share of those that cover the goals, and how many random
#: combinations each is the best of. Pairs leave a third of all triples uncovered.
TRIPLES, BEST_OF = 0.5, 4


class Operand(NamedTuple):
    """What a call gives for a parameter.

    Attributes:
        shape, strides, dtype: of the one tensor that it is; None for several, as in a list or a record.
        dims: how many dimensions the tensor with most of them has.
        duplicates: whether it is a list with two floating-point tensors of the same shape, strides and dtype.
        unequal: whether it is a list with two of other sizes.
    """

    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    dims: int = 0
    duplicates: bool = False
    unequal: bool = False

    @classmethod
    def of(cls, value: Any) -> Operand:
        if not isinstance(value, torch.Tensor):
            dims = max((tensor.dim() for _, tensor in transfer.tensors({"": value})), default=0)
            items = value if isinstance(value, list) else []
            forms = [cls.of(x) for x in items if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
            unequal = len({math.prod(one.shape or ()) for one in forms}) > 1
            return cls(dims=dims, duplicates=len(set(forms)) < len(forms), unequal=unequal)
        return cls(tuple(value.shape), value.stride(), value.dtype, value.dim())


class Claims:
    """Which combinations of a space's values the implementations of its operator claim.

    Args:
        space: of the combinations.
        subjects: the implementations, all on one device.
        seed: of the data that a case is made with.
    """

    def __init__(self, space: Space, subjects: Sequence[Subject], seed: int = 0) -> None:
        self.space = space
        self.subjects = {one.id: one for one in subjects}
        self.seed = seed
        self._known: dict[tuple[str, ...], dict[str, Claim]] = {}
        self._operands: dict[tuple[str, ...], dict[str, Operand]] = {}

    def claim(self, subject: str, values: Values) -> Claim:
        """Whether dispatch would give the subject a call of these values. Made once for all subjects."""
        key = tuple(values.values())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._asked(values)
        return known[subject]

    def _asked(self, values: Values) -> dict[str, Claim]:
        case = Case.of(self.space.operator, self.space.name, values, self.seed)
        first = next(iter(self.subjects.values()))
        sketched = self.space.make(case.values, Sketch(case, first.manager))
        arguments = transfer.moved(sketched, first.device, contents=False)
        self._operands[tuple(values.values())] = {
            name: Operand.of(value)
            for name, value in arguments.items()
            if any(tensor.numel() for _, tensor in transfer.tensors({name: value}))
        }
        return {name: subject.claim(arguments) for name, subject in self.subjects.items()}

    def operands(self, values: Values) -> Mapping[str, Operand]:
        """The parameters for which a call of these values has tensors that are not empty."""
        self.claim(next(iter(self.subjects)), values)
        return self._operands[tuple(values.values())]

    def hopeless(self, subject: str, values: Values) -> bool:
        """Whether the refusal of one combination is a refusal of all."""
        return self.claim(subject, values).where in _HOPELESS


@dataclass(frozen=True)
class Coverage:
    """What an implementation claims of a space.

    Attributes:
        implementation, space: ids.
        goals: that some combination which it claims holds, in the space's order.
        planned: combinations that it claims and that a run of the whole plan judges.
        excluded: combinations that it claimed and then declined when it was called.
    """

    implementation: str
    space: str
    goals: tuple[Goal, ...]
    planned: tuple[Values, ...]
    excluded: tuple[Values, ...] = ()

    def left(self, judged: Iterable[Values]) -> list[Goal]:
        """The goals that no judged combination holds."""
        remaining = dict.fromkeys(self.goals)
        for values in judged:
            if not remaining:
                break
            for goal in [goal for goal in remaining if holds(values, goal)]:
                del remaining[goal]
        return list(remaining)

    def without_declined(self, judged: Iterable[Values]) -> Coverage:
        """The same less the goals that calls were declined for again and again, which requirements do not say."""
        left = self.left(judged)
        gone = {goal for goal in left if sum(holds(one, goal) for one in self.excluded) >= DECLINED}
        return dataclasses.replace(self, goals=tuple(goal for goal in self.goals if goal not in gone))


def holds(values: Values, goal: Goal) -> bool:
    """Whether a combination has all values of a goal."""
    return all(values.get(name) == value for name, value in goal)


def goals_of(space: Space) -> Iterator[Goal]:
    """Every goal of a space, whether anybody claims it or not; single values first."""
    for axis in space.axes:
        for value in dict.fromkeys((*axis.values, *axis.once)):
            yield ((axis.name, value),)
    plainest = {axis.name: axis.values[0] for axis in space.axes}
    for partial in space.fixed:
        # In other cases that hold them, NaN or an option may hide what they show.
        yield tuple({**plainest, **partial}.items())
        yield tuple(partial.items())
    groups = [*itertools.combinations((axis.name for axis in space.axes), 2), *space.together]
    values = {axis.name: axis.values for axis in space.axes}
    for group in groups:
        for combination in itertools.product(*(values[name] for name in group)):
            yield tuple(zip(group, combination))
    for partial in space.within:
        others = [name for name in values if name not in partial]
        for one, other in itertools.combinations(others, 2):
            for pair in itertools.product(values[one], values[other]):
                held = {**partial, one: pair[0], other: pair[1]}
                yield tuple((name, held[name]) for name in values if name in held)


def cover(
    claims: Claims, subject: str, base: Sequence[Values], seed: int = 0, excluded: Sequence[Values] = ()
) -> Coverage:
    """What one implementation claims of a space, with combinations that hold all of it.

    Args:
        claims: of the space.
        subject: the implementation's id.
        base: combinations that are run for everybody; those that it claims are used first.
        seed: of the choices among equals.
        excluded: combinations that it claims and declines when it is called: counted as refused.
    """
    space, goals = claims.space, list(dict.fromkeys(goals_of(claims.space)))
    declined = {tuple(values.values()) for values in excluded}

    def refusal(values: Values) -> str | None:
        if tuple(values.values()) in declined:
            return "declined when it was called"
        return claims.claim(subject, values).refusal

    planned: list[Values] = [values for values in base if refusal(values) is None]
    axes = {axis.name: axis.values for axis in space.axes}
    hidden = functools.partial(_hidden, space)
    filler = Filler(axes, space.valid, refusal, planned, seed, hidden)
    if not planned:
        if not base or claims.hopeless(subject, base[0]):
            return Coverage(claims.subjects[subject].id, space.id, (), ())
        found = filler.search(base)
        if found is None:
            return Coverage(claims.subjects[subject].id, space.id, (), ())
        planned.append(found)
    claimed = _filled(filler, goals, planned, hidden)
    _add_triples(filler, planned, int(TRIPLES * len(planned)), hidden)
    _add_plain(space, refusal, planned)
    return Coverage(claims.subjects[subject].id, space.id, tuple(claimed), tuple(planned), tuple(excluded))


def _hidden(space: Space, values: Values) -> frozenset[str]:
    """The axes whose values leave nothing to see of the others' (`Axis.dull`)."""
    return frozenset(axis.name for axis in space.axes if axis.is_dull(values[axis.name]))


def _filled(
    filler: Filler, goals: Sequence[Goal], planned: list[Values], hidden: Callable[[Values], frozenset[str]]
) -> list[Goal]:
    """The goals that were found in a claimed combination; adds to `planned` what holds those that it lacks, or holds
    them only where they do not show."""
    shown, held = _Index(goals, hidden), _Index(goals)
    for values in planned:
        shown.take(values)
        held.take(values)
    impossible: set[tuple[str, str]] = set()
    for goal in goals:
        if goal not in shown.left or not impossible.isdisjoint(goal):
            continue
        # Starting from another known combination each time varies what the goal leaves open.
        filler.accepted.append(filler.accepted.pop(0))
        found = filler.find(goal, shown=True) or (filler.find(goal) if goal in held.left else None)
        if found is None:
            if len(goal) == 1 and goal in held.left:
                impossible.add(goal[0])
            continue
        values = filler.improved(found, goal, shown.gain)
        filler.accept(values)
        planned.append(values)
        shown.take(values)
        held.take(values)
    return held.taken


class _Index:
    """Goals that are still open, found fast by the values that they hold.

    Args:
        goals: all of them.
        hidden: axes of a combination that leave nothing to see of the others: it holds goals of these axes alone.
    """

    def __init__(self, goals: Sequence[Goal], hidden: Callable[[Values], frozenset[str]] | None = None) -> None:
        self.left = dict.fromkeys(goals)
        self.taken: list[Goal] = []
        groups = dict.fromkeys(tuple(name for name, _ in goal) for goal in goals)
        self._groups = [(group, frozenset(group)) for group in groups]
        self._hidden = hidden

    def _of(self, values: Values) -> Iterator[Goal]:
        needed = frozenset() if self._hidden is None else self._hidden(values)
        for group, names in self._groups:
            if needed <= names:
                goal = tuple((name, values[name]) for name in group)
                if goal in self.left:
                    yield goal

    def gain(self, values: Values) -> int:
        return sum(1 for _ in self._of(values))

    def take(self, values: Values) -> None:
        for goal in list(self._of(values)):
            del self.left[goal]
            self.taken.append(goal)


def _triples(values: Values, among: frozenset[str] = frozenset()) -> Iterator[Goal]:
    """The triples of a combination, those alone that have all axes of `among`."""
    if not among:
        return itertools.combinations(values.items(), 3)
    if len(among) > 3:
        return iter(())
    return (triple for triple in itertools.combinations(values.items(), 3) if among <= {name for name, _ in triple})


def _add_triples(filler: Filler, planned: list[Values], count: int, hidden: Callable[[Values], frozenset[str]]) -> None:
    """Add random claimed combinations, each the one of several that shows most triples which none showed before."""
    if len(filler.accepted) < 2:
        return
    covered = {triple for values in planned for triple in _triples(values, hidden(values))}
    known = {tuple(values.values()) for values in planned}
    for _ in range(count):
        drawn = [values for values in (filler.neighbour() for _ in range(BEST_OF)) if values is not None]
        fresh = [values for values in drawn if tuple(values.values()) not in known]
        if not fresh:
            continue
        best = max(fresh, key=lambda values: sum(triple not in covered for triple in _triples(values, hidden(values))))
        planned.append(best)
        known.add(tuple(best.values()))
        covered.update(_triples(best, hidden(best)))


def _add_plain(space: Space, refusal: Callable[[Values], str | None], planned: list[Values]) -> None:
    """Add each value of each axis to the plainest combination that takes it.

    Its other cases have whatever values of the other axes are due. Among those may be one that leaves nothing to see,
    such as a flag that stops the operator; and a kernel that serves an option alone may not be the one that serves it
    together with others.
    """
    plain, known = planned[0], {tuple(values.values()) for values in planned}
    for axis in space.axes:
        for value in (*axis.values, *axis.once):
            wanted = {**plain, axis.name: value}
            others = ({**wanted, o.name: v} for o in space.axes if o is not axis for v in o.values)
            for values in itertools.chain((wanted,), others):
                if space.valid(values) and refusal(values) is None:
                    if tuple(values.values()) not in known:
                        planned.append(values)
                        known.add(tuple(values.values()))
                    break


@dataclass(frozen=True)
class Covered:
    """What an implementation claims of a space, and what of that was judged. Pairs of numbers are (judged, claimed).

    Attributes:
        implementation, space: ids.
        pairs: pairs of values of two axes.
        groups: combinations of the axes that are covered together, and fixed cases.
        values: of single axes, those that need one case each among them: sizes beyond the thresholds at which kernels
            change strategy.
        triples: of values of three axes; claimed is an upper estimate.
        never_run: what is claimed and was not judged, in words.
    """

    implementation: str
    space: str
    pairs: tuple[int, int]
    groups: tuple[int, int]
    values: tuple[int, int]
    triples: tuple[int, int]
    never_run: tuple[str, ...] = ()

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Covered:
        found: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
        return cls(**found)


@dataclass(frozen=True)
class Unjudged:
    """A claim of a manifest's that no unit judged, and why."""

    implementation: str
    claim: str
    reason: str


def covered(coverage: Coverage, judged: Sequence[Values]) -> Covered:
    """Add up what the judged combinations of a space hold of what an implementation claims."""
    left = set(coverage.left(judged))
    singles = [goal for goal in coverage.goals if len(goal) == 1]
    pairs = [goal for goal in coverage.goals if len(goal) == 2]
    groups = [goal for goal in coverage.goals if len(goal) > 2]
    of_pairs, of_groups, of_values = (
        (sum(goal not in left for goal in goals), len(goals)) for goals in (pairs, groups, singles)
    )
    told = tuple(described(goal) for goal in simplest([goal for goal in coverage.goals if goal in left]))
    triples = _triples_of(coverage, judged)
    return Covered(coverage.implementation, coverage.space, of_pairs, of_groups, of_values, triples, told)


def _triples_of(coverage: Coverage, judged: Sequence[Values]) -> tuple[int, int]:
    """How many triples of values judged combinations hold, and how many there are all of whose pairs are claimed."""
    singles = [goal[0] for goal in coverage.goals if len(goal) == 1]
    names_of = [name for name in (coverage.planned[0] if coverage.planned else ()) if name in dict(singles)]
    pairs = {goal for goal in coverage.goals if len(goal) == 2}
    values = {name: [v for n, v in singles if n == name] for name in names_of}
    held = {triple for one in judged for triple in _triples(one)}
    possible = 0
    for names in itertools.combinations(values, 3):
        for combination in itertools.product(*(values[name] for name in names)):
            parts = tuple(zip(names, combination))
            possible += all(pair in pairs for pair in itertools.combinations(parts, 2))
    return len(held), max(possible, len(held))


def described(goal: Goal) -> str:
    """A goal for people: ``kind=relu, layout=NN``."""
    return ", ".join(f"{name}={value}" for name, value in goal)


def simplest(goals: Sequence[Goal]) -> list[Goal]:
    """Goals that no smaller one among them is part of: a value that never ran is not told again with every other."""
    single = {goal[0] for goal in goals if len(goal) == 1}
    return [goal for goal in goals if len(goal) == 1 or single.isdisjoint(goal)]
