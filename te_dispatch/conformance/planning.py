# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""From settings to units, in an order in which one case's implementations follow one another (the oracle runs once)."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from te_dispatch.conformance import checks, covering, transfer
from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.recording import RECORDED, Recording
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.conformance.space import Space, find, spaces
from te_dispatch.conformance.subject import Subject, subject, subjects
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS

#: Level smoke runs at most so many cases of a space; its axes' values come in pairs before that.
SMOKE_CASES = 6
#: A check that runs on a few cases looks for those that its subject claims among so many.
CANDIDATE_CASES = 24
#: Seeds of level soak.
SOAK_SEEDS = 3


def device_of(settings: Settings) -> torch.device:
    """The device that subjects run on.

    Raises:
        UsageError: there is no such device.
    """
    if settings.device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device: {settings.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def plan(manager: OpManager, settings: Settings) -> list[Unit]:
    """All units of a run, this shard's only.

    Raises:
        UsageError: an unknown backend, implementation or operator.
        ValueError: an unknown check.
    """
    device = device_of(settings)
    backends = backends_of(manager, settings)
    wanted = [checks.find(name) for name in settings.checks] if settings.checks else checks.checks()
    units: list[Unit] = []
    for operator in _operators(settings):
        tested = [s for s in subjects(manager, OPERATORS[operator], device) if s.id.partition(".")[0] in backends]
        tested = [s for s in tested if not settings.implementations or s.id in settings.implementations]
        for space in spaces(operator) if tested else ():
            units += _of_space(space, tested, wanted, settings)
    part, parts = settings.shard
    return units[len(units) * (part - 1) // parts : len(units) * part // parts]


def named(manager: OpManager, settings: Settings, units: Sequence[Unit]) -> list[Unit]:
    """Units that somebody asked for by their ids, all of which exist.

    Raises:
        UsageError: an unknown operator, axis or value, or the combination is no call that the contract allows.
        ValueError: an unknown implementation, check or space.
    """
    device = device_of(settings)
    backends_of(manager, settings)
    for unit in units:
        checks.find(unit.check)
        case = unit.case
        if case.operator not in OPERATORS:
            raise UsageError(f"operator: {case.operator!r} is none of {', '.join(OPERATORS)}")
        subject(manager, OPERATORS[case.operator], device, unit.implementation)
        if case.space == RECORDED:
            Recording.of_case(case)
            continue
        space = find(case.operator, case.space)
        _require_axes(space, case)
    return list(units)


def _require_axes(space: Space, case: Case) -> None:
    names = [axis.name for axis in space.axes]
    if [name for name, _ in case.axes] != names:
        got = ", ".join(name for name, _ in case.axes) or "none"
        raise UsageError(f"case: {space.id} has the axes {', '.join(names)}, in this order; got {got}")
    for axis in space.axes:
        known = axis.known
        if case.values[axis.name] not in known:
            got = case.values[axis.name]
            raise UsageError(f"case: {space.id} has no {axis.name} {got!r}, expected one of: {', '.join(known)}")
    if not space.valid(case.values):
        raise UsageError(f"case: {case.id} is a combination that the contract of {case.operator} does not allow")


def _of_space(
    space: Space, tested: Sequence[Subject], wanted: Sequence[checks.Check], settings: Settings
) -> Iterator[Unit]:
    cases = cases_of(space, settings.level, settings.seed, settings.product)
    plans = []
    for check in wanted:
        able = [s for s in tested if check.of_errors == (space.raises is not None) and check.applies(s, space) is None]
        plans.append((check, check.smoke if settings.level == "smoke" else check.full, able))
    most = max((count for _, count, able in plans if count is not None and able), default=0)
    served = _served({one.id: one for _, count, able in plans if count is not None for one in able}, space, cases, most)
    for check, count, able in plans:
        if count is None:
            yield from (Unit(one.id, check.name, case) for case in cases for one in able)
            continue
        for one in able:
            yield from (Unit(one.id, check.name, case) for case in served[one.id][:count] or cases[:1])


def _served(tested: Mapping[str, Subject], space: Space, cases: Sequence[Case], count: int) -> dict[str, list[Case]]:
    """The first cases that each subject claims, at most `count`; none where it claims none of the first ones."""
    found: dict[str, list[Case]] = {name: [] for name in tested}
    for case in cases[:CANDIDATE_CASES]:
        wanting = [one for name, one in tested.items() if len(found[name]) < count]
        if not wanting:
            break
        # Making a case may cost a forward of the reference; subjects ask about the same one.
        made = space.make(case.values, Maker(case, wanting[0].manager))
        arguments = transfer.moved(made, wanting[0].device)
        for one in wanting:
            if one.claim(arguments).refusal is None:
                found[one.id].append(case)
    return found


@functools.lru_cache(maxsize=512)
def cases_of(space: Space, level: str, seed: int = 0, every: bool = False) -> tuple[Case, ...]:
    """The cases of a space at a level, the plainest first."""
    if level == "smoke":
        axes = {axis.name: axis.smoke or axis.values for axis in space.axes}
    else:
        axes = {axis.name: axis.values for axis in space.axes}
    if space.sampled and level != "soak":
        return ()
    combine = covering.product if every else covering.pairwise
    combinations = list(combine(axes, space.valid))
    if level == "smoke" and not every:
        combinations = combinations[:SMOKE_CASES]
    if level != "smoke":
        plain = combinations[0]
        added = [{**plain, **values} for values in space.fixed]
        added += [{**plain, axis.name: value} for axis in space.axes for value in axis.once]
        combinations += [values for values in added if space.valid(values) and values not in combinations]
    if level == "soak":
        plain = combinations[0]
        combinations += [{**plain, axis.name: value} for axis in space.axes for value in axis.soak]
    seeds = range(seed, seed + SOAK_SEEDS) if level == "soak" else (seed,)
    return tuple(Case.of(space.operator, space.name, values, s) for s in seeds for values in combinations)


def backends_of(manager: OpManager, settings: Settings) -> frozenset[str]:
    """The backends that a run certifies.

    Raises:
        UsageError: one of them, the oracle's, or an implementation that was named is not installed.
    """
    installed = set(manager.snapshot.backends)
    for name in (*settings.backends, settings.against):
        if name not in installed:
            raise UsageError(f"backend: {name!r} is not installed; installed: {', '.join(sorted(installed)) or 'none'}")
    for candidate in settings.implementations:
        try:
            manager.snapshot.implementation(candidate)
        except KeyError:
            raise UsageError(f"implementation: {candidate!r} is not installed") from None
    return frozenset(settings.backends or installed - {settings.against})


def _operators(settings: Settings) -> list[str]:
    if not settings.operators:
        return list(OPERATORS)
    found: dict[str, None] = {}
    for pattern in settings.operators:
        named = [n for n, o in OPERATORS.items() if fnmatch.fnmatch(n, pattern) or o.family == pattern]
        if not named:
            families = ", ".join(dict.fromkeys(o.family for o in OPERATORS.values()))
            raise UsageError(
                f"op: {pattern!r} is no operator, family or glob that matches one; families: {families}; operators: "
                f"{', '.join(OPERATORS)}"
            )
        found.update(dict.fromkeys(named))
    return [name for name in OPERATORS if name in found]
