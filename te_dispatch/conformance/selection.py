# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which cases of a space a level runs, for each implementation that is under test."""

from __future__ import annotations

import collections
import functools
import math
import random
from collections.abc import Iterator, Sequence

from te_dispatch.conformance import checks, covering
from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.coverage import Claims, Coverage, cover
from te_dispatch.conformance.inputs import SPECIAL
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.settings import Settings
from te_dispatch.conformance.space import Space, Values, find
from te_dispatch.conformance.subject import Subject

#: Level smoke runs at most so many cases of a space per implementation; its axes' values come in pairs before that.
SMOKE_CASES = 6
#: A check of each operand sees it in so many cases: one case may drop, mask or ignore what an operand holds.
EACH_OPERAND = 2
#: Seeds of level soak.
SOAK_SEEDS = 3


def judges_every_case(check: checks.Check, space: Space) -> bool:
    """Whether a check is the one that judges every case of a space: the numbers, or the error that must come."""
    return check.smoke is None and check.of_errors == (space.raises is not None)


def _is_judged(space: Space, subject: Subject) -> bool:
    """Whether the check that judges every case of a space applies: what contents alone show, no device is asked."""
    judges = [check for check in checks.checks() if judges_every_case(check, space)]
    return not judges or any(check.applies(subject, space) is None for check in judges)


@functools.lru_cache(maxsize=512)
def cases_of(space: Space, level: str, seed: int = 0) -> tuple[Case, ...]:
    """Cases that cover what the contract of a space allows, whoever claims them; the plainest first.

    Another seed than 0 changes both the data and which values of different axes meet beyond pairs.
    """
    if (space.sampled and level != "soak") or (space.slow and level == "smoke"):
        return ()
    if level == "smoke":
        axes = {axis.name: axis.smoke or axis.values for axis in space.axes}
    else:
        axes = {axis.name: axis.values for axis in space.axes}
    turned = {name: _turned(values, seed) for name, values in axes.items()}
    combinations = [{name: c[name] for name in axes} for c in covering.pairwise(turned, space.valid)]
    plain = covering.pairwise(axes, space.valid)[:1] if seed else []
    combinations = [*plain, *(c for c in combinations if c not in plain)]
    if level == "soak":
        first = combinations[0]
        combinations += [{**first, axis.name: value} for axis in space.axes for value in axis.soak]
    seeds = range(seed, seed + SOAK_SEEDS) if level == "soak" else (seed,)
    return tuple(Case.of(space.operator, space.name, values, s) for s in seeds for values in combinations)


def _turned(values: tuple[str, ...], seed: int) -> tuple[str, ...]:
    places = random.Random(seed).sample(range(len(values)), len(values)) if seed else range(len(values))
    return tuple(values[place] for place in places)


class SpacePlan:
    """The cases of one space for each implementation that is under test.

    Attributes:
        refused: outcomes of units that an implementation does not claim.
        coverage: what each claims.
    """

    def __init__(self, space: Space, tested: Sequence[Subject], settings: Settings) -> None:
        tested = [one for one in tested if _is_judged(space, one)]
        self.space, self.tested, self.settings = space, tested, settings
        self.refused: list[Outcome] = []
        self.coverage: list[Coverage] = []
        level, seed = settings.level, settings.seed
        self._claims = Claims(space, tested, seed)
        self._others: dict[str, bool] = {}
        self._all: dict[str, list[Case]] = {one.id: [] for one in tested}
        self._claimed: dict[str, list[Case]] = {one.id: [] for one in tested}
        if space.sampled:  # making their arguments takes gigabytes: nobody is asked before they run
            self._all = {one.id: list(cases_of(space, level, seed)) for one in tested}
            self._claimed = dict(self._all)
            return
        if level == "smoke":
            self._plan_smoke()
            return
        for offset in range(SOAK_SEEDS if level == "soak" else 1):
            self._plan_covering(seed + offset)
        huge = [case for case in cases_of(space, level, seed) if _is_soak(space, case)]
        for one in tested:
            self._all[one.id] += huge
            self._claimed[one.id] += huge

    def _plan_smoke(self) -> None:
        """The first cases that an implementation claims; where it claims none of them, the first for their reasons."""
        cases = cases_of(self.space, "smoke", self.settings.seed)
        for one in self.tested:
            claimed: list[Case] = []
            for case in cases:
                if len(claimed) == SMOKE_CASES or self._claims.hopeless(one.id, case.values):
                    break
                if self._claims.claim(one.id, case.values).refusal is None:
                    claimed.append(case)
            self._all[one.id] = claimed or list(cases[:SMOKE_CASES])
            self._claimed[one.id] = claimed

    def _plan_covering(self, seed: int) -> None:
        """Everything that each implementation claims. Cases made for one serve the next where it claims them too."""
        general = [case.values for case in cases_of(self.space, "full", seed)]
        base: dict[tuple[str, ...], Values] = {tuple(values.values()): values for values in general}
        for one in self.tested:
            found = cover(self._claims, one.id, list(base.values()), seed)
            self.coverage += [found] if seed == self.settings.seed else []
            base |= {tuple(values.values()): values for values in found.planned}
        for one in self.tested:
            # Where nothing can be claimed here, one case is enough to say why.
            shown = general[: 1 if self._claims.hopeless(one.id, general[0]) else None]
            claimed = [v for v in base.values() if self._claims.claim(one.id, v).refusal is None]
            self._claimed[one.id] += [self._case(values, seed) for values in claimed]
            every = {tuple(values.values()): dict(values) for values in (*shown, *claimed)}
            self._all[one.id] += [self._case(values, seed) for values in every.values()]

    def _case(self, values: Values, seed: int) -> Case:
        return Case.of(self.space.operator, self.space.name, values, seed)

    def units(self, wanted: Sequence[checks.Check]) -> Iterator[Unit]:
        """Units of the checks that apply; those that are not claimed go to `refused` as well."""
        smoke = self.settings.level == "smoke"
        for check in wanted:
            if self.space.checks and check.name not in self.space.checks:
                continue
            able = [
                one
                for one in self.tested
                if check.of_errors == (self.space.raises is not None) and check.applies(one, self.space) is None
            ]
            count = check.smoke if smoke else check.full
            if count is None:
                yield from self._of_all(check, able)
                continue
            for one in able if count else ():
                if smoke and check.of_forms and self._stood_for(one):
                    continue
                claimed = self._showing(check, one)
                chosen = self._chosen(check, claimed, count) or self._all[one.id][:1]
                if check.of_forms and not smoke:
                    chosen += of_forms(self.space, claimed, chosen)
                    chosen += self._deeper(claimed, chosen)
                    chosen += self._of_operands(claimed, chosen)
                yield from self._noted(check, one, chosen)

    def _stood_for(self, one: Subject) -> bool:
        """Whether an implementation claims a case of the space that this one is `like`."""
        if not self.space.like:
            return False
        if one.id not in self._others:
            other = find(self.space.operator, self.space.like)
            claims = Claims(other, [one], self.settings.seed)
            cases = cases_of(other, "smoke", self.settings.seed)
            self._others[one.id] = any(claims.claim(one.id, case.values).refusal is None for case in cases)
        return self._others[one.id]

    def _showing(self, check: checks.Check, one: Subject) -> list[Case]:
        """The claimed cases that a check sees anything in; all, where that is none."""
        claimed = self._claimed[one.id]
        if check.shows is None or self.space.sampled:
            return claimed
        operands = [self._claims.operands(case.values) for case in claimed]
        return [case for case, given in zip(claimed, operands) if check.shows(one, self.space, given)] or claimed

    def _chosen(self, check: checks.Check, claimed: list[Case], count: int) -> list[Case]:
        if not check.each_operand or self.space.sampled:
            return spread(self.space, claimed, count)
        ordered = sorted(claimed, key=functools.partial(_unusual, self.space))
        chosen: list[Case] = []
        seen: collections.Counter[str] = collections.Counter()
        for case in ordered:
            given = self._claims.operands(case.values)
            if len(chosen) < count and any(seen[name] < EACH_OPERAND for name in given):
                chosen.append(case)
                seen.update(given.keys())
        return chosen

    def _deeper(self, claimed: Sequence[Case], chosen: Sequence[Case]) -> list[Case]:
        """A case with an operand of more dimensions than any of the chosen has, if there is one: rows, and what there
        is for each row, then lie in memory in more ways."""
        if self.space.sampled:
            return []

        def rank(case: Case) -> int:
            shapes = [given.shape for given in self._claims.operands(case.values).values()]
            return max((len(shape) for shape in shapes if shape is not None), default=0)

        most = max(map(rank, chosen), default=0)
        deeper = [case for case in claimed if rank(case) > most]
        return sorted(deeper, key=functools.partial(_unusual, self.space))[:1]

    def _of_operands(self, claimed: Sequence[Case], chosen: Sequence[Case]) -> list[Case]:
        """The plainest case with each parameter that has a tensor, one of several elements, or one of several
        dimensions, in none of the chosen but in some case that is claimed: what is optional lies in memory, too."""
        if self.space.sampled:
            return []

        def given(case: Case) -> set[tuple[str, str]]:
            operands = self._claims.operands(case.values).items()
            several = {(name, "elements") for name, x in operands if math.prod(x.shape or (0,)) > 1}
            rows = {(name, "dimensions") for name, x in operands if x.dims > 1}
            return {(name, "") for name, _ in operands} | several | rows

        seen = {one for case in chosen for one in given(case)}
        found: list[Case] = []
        for case in sorted(claimed, key=functools.partial(_unusual, self.space)):
            if given(case) - seen:
                found.append(case)
                seen |= given(case)
        return found

    def _of_all(self, check: checks.Check, able: Sequence[Subject]) -> Iterator[Unit]:
        order: dict[Case, list[Subject]] = {}
        for one in able:
            for case in self._all[one.id]:
                order.setdefault(case, []).append(one)
        for case, having in order.items():
            for one in having:
                yield from self._noted(check, one, [case])

    def _noted(self, check: checks.Check, one: Subject, cases: Sequence[Case]) -> Iterator[Unit]:
        for case in cases:
            unit = Unit(one.id, check.name, case)
            if case.seed == self.settings.seed and not self.space.sampled and not _is_soak(self.space, case):
                refusal = self._claims.claim(one.id, case.values).refusal
                if refusal is not None:
                    self.refused.append(Outcome(unit.id, "not_claimed", refusal))
            yield unit


def spread(space: Space, cases: Sequence[Case], count: int) -> list[Case]:
    """Some of the cases: the plainest, the largest sizes, then those with most values that none before them has."""
    large = {(axis.name, value) for axis in space.axes for value in axis.once}
    left = list(cases)
    chosen: list[Case] = []
    seen: set[tuple[str, str]] = set()
    while left and len(chosen) < count:
        if chosen:
            best = max(left, key=lambda case: sum(1 + 8 * (v in large) for v in case.axes if v not in seen))
        else:
            best = left[0]
        left.remove(best)
        chosen.append(best)
        seen.update(best.axes)
    return chosen


def _unusual(space: Space, case: Case) -> int:
    """How many axes do not have their plainest value. NaN and Inf among an operand's values count for more than that,
    and a size beyond the usual thresholds for more still."""
    values = case.values
    differing = sum(axis.values[0] != values[axis.name] for axis in space.axes)
    special = sum(value in SPECIAL for value in values.values())
    large = sum(values[axis.name] in axis.once for axis in space.axes)
    return differing + 100 * special + 10_000 * large


def of_forms(space: Space, cases: Sequence[Case], chosen: Sequence[Case]) -> list[Case]:
    """A case of each combination of the values of `Space.forms` that none of the chosen has: those with most of the
    plainest values."""
    if not space.forms:
        return []
    plainest = {axis.name: axis.values[0] for axis in space.axes}

    def form(case: Case) -> tuple[str, ...]:
        return tuple(case.values[name] for name in space.forms)

    found: dict[tuple[str, ...], Case] = {}
    for case in sorted(cases, key=lambda case: -sum(plainest[name] == value for name, value in case.axes)):
        found.setdefault(form(case), case)
    seen = {form(case) for case in chosen}
    return [case for combination, case in found.items() if combination not in seen]


def _is_soak(space: Space, case: Case) -> bool:
    values = case.values
    return any(values[axis.name] in axis.soak for axis in space.axes)
