# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""From settings to units, in an order in which one case's implementations follow one another (the oracle runs once)."""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from te_dispatch.conformance import checks, covering
from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.coverage import Claims, Coverage, Covered, Unjudged, cover
from te_dispatch.conformance.coverage import covered as coverage_of
from te_dispatch.conformance.emulated import emulated_device, emulating_backends
from te_dispatch.conformance.outcome import DECLINED, JUDGED, REFUSED, Outcome
from te_dispatch.conformance.parallel import mapped
from te_dispatch.conformance.recording import RECORDED, Recording
from te_dispatch.conformance.selection import SpacePlan, judges_every_case
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.conformance.space import Space, Values, find, spaces
from te_dispatch.conformance.subject import Subject, subject, subjects
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS

#: Told how far planning is: (operator, how many spaces are planned, how many there are).
Planning = Callable[[str, int, int], None]


class Streamed:
    """Units that are made while they are asked for, of which there may be more than memory holds."""

    def __init__(self, make: Callable[[], Iterator[Unit]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Unit]:
        return self._make()


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        units: in an order in which one case's implementations follow one another, so that the oracle runs once.
        decided: outcomes that are known without running: the units that an implementation does not claim.
        coverage: what each implementation claims of each space, of the whole plan and not of a shard alone; empty at
            level smoke, for single units and for ``product``, where nothing is promised about what is run.
    """

    units: Sequence[Unit] | Streamed
    decided: Mapping[str, Outcome] = field(default_factory=dict)
    coverage: tuple[Coverage, ...] = ()


def device_of(settings: Settings) -> torch.device:
    """The device that subjects run on; of an emulated one the host.

    Raises:
        UsageError: there is no such device.
    """
    if emulated_device(settings) is not None:
        return torch.device("cpu")
    if settings.device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device: {settings.device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def plan(manager: OpManager, settings: Settings, told: Planning | None = None) -> Plan:
    """All units of a run, this shard's only.

    Raises:
        UsageError: an unknown backend, implementation or operator.
        ValueError: an unknown check.
    """
    part, parts = settings.shard
    if settings.product:
        return Plan(Streamed(lambda: itertools.islice(_streamed(manager, settings), part - 1, None, parts)))
    units: list[Unit] = []
    decided: dict[str, Outcome] = {}
    coverage: list[Coverage] = []
    names = [(space.operator, space.name) for space, _ in _spaces_of(manager, settings)]
    _checks(settings)  # an unknown check is refused before any worker starts
    # Level smoke is planned in less time than workers take to start.
    here = replace(settings, jobs=1) if settings.level == "smoke" else settings
    planned = mapped(plan_of_space, names, manager, here)
    for number, (operator, _) in enumerate(names):
        if told is not None:
            told(operator, number, len(names))
        found = next(planned)
        units += found.units
        decided |= found.decided
        coverage += found.coverage
    chosen = units[len(units) * (part - 1) // parts : len(units) * part // parts]
    ids = {unit.id for unit in chosen}
    return Plan(chosen, {name: outcome for name, outcome in decided.items() if name in ids}, tuple(coverage))


def plan_of_space(manager: OpManager, settings: Settings, operator: str, name: str) -> Plan:
    """The units of one space, of all shards."""
    space = find(operator, name)
    wanted = _checks(settings)
    planned = SpacePlan(space, _tested(manager, settings, operator), settings)
    units = list(planned.units(wanted))
    judged = any(judges_every_case(check, space) for check in wanted)
    decided = {outcome.unit: outcome for outcome in planned.refused}
    return Plan(units, decided, tuple(planned.coverage) if judged else ())


def further(manager: OpManager, settings: Settings, outcomes: Sequence[Outcome], coverage: Sequence[Coverage]) -> Plan:
    """Units that hold what no judged one does because implementations declined when they were called.

    Args:
        outcomes: of all units so far.
        coverage: of the plan, or of the last call of this function.
    """
    judged, declined = _by_space(outcomes)
    asked: dict[tuple[str, str], tuple[Coverage, list[Values], list[Values]]] = {}
    for one in coverage:
        key = (one.implementation, one.space)
        planned = {tuple(values.values()) for values in one.planned}
        late = [values for values in declined.get(key, ()) if tuple(values.values()) in planned]
        if late and one.left(judged.get(key, ())):
            asked[key] = (one, judged.get(key, []), late)
    fresh = dict(zip(asked, mapped(renewed, list(asked.values()), manager, settings)))
    units: list[Unit] = []
    for key, (one, ran, _) in asked.items():
        operator, _, name = one.space.partition(".")
        check = next(c for c in checks.checks() if judges_every_case(c, find(operator, name)))
        known = {tuple(values.values()) for values in ran}
        cases = [values for values in fresh[key].planned if tuple(values.values()) not in known]
        units += [Unit(one.implementation, check.name, Case.of(operator, name, v, settings.seed)) for v in cases]
    return Plan(units, {}, tuple(fresh.get((one.implementation, one.space), one) for one in coverage))


def renewed(manager: OpManager, settings: Settings, one: Coverage, ran: list[Values], late: list[Values]) -> Coverage:
    """What an implementation claims of a space without what it declined.

    Args:
        one: its coverage so far.
        ran: values of the cases that were judged.
        late: values of planned cases that it claimed, and declined when it was called.
    """
    operator, _, name = one.space.partition(".")
    tested = [subject(manager, OPERATORS[operator], device_of(settings), one.implementation)]
    claims = Claims(find(operator, name), tested, settings.seed)
    fresh = cover(claims, one.implementation, ran, settings.seed, (*one.excluded, *late))
    return fresh.without_declined(ran)


def _by_space(outcomes: Sequence[Outcome]) -> tuple[dict[tuple[str, str], list[Values]], ...]:
    """(implementation, space) -> values of the cases that were judged, and of those that were declined."""
    judged: dict[tuple[str, str], list[Values]] = {}
    declined: dict[tuple[str, str], list[Values]] = {}
    for outcome in outcomes:
        unit = outcome.parsed
        if checks.find(unit.check).smoke is not None or outcome.cause == REFUSED:
            continue
        into = judged if outcome.state in JUDGED else declined if outcome.state == "not_claimed" else None
        if into is not None:
            into.setdefault((unit.implementation, f"{unit.case.operator}.{unit.case.space}"), []).append(
                unit.case.values
            )
    return judged, declined


def covered(coverage: Sequence[Coverage], outcomes: Sequence[Outcome]) -> list[Covered]:
    """What was judged of what each implementation claims, where it claims anything and can be bound."""
    judged, _ = _by_space(outcomes)
    unbound = {outcome.parsed.implementation for outcome in outcomes if outcome.cause == REFUSED}
    asked = [one for one in coverage if one.goals and one.implementation not in unbound]
    return [coverage_of(one, judged.get((one.implementation, one.space), ())) for one in asked]


def declining(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Implementations that declined every call of the cases that they claim, and what they said; of those cases that
    the check of numbers was run on."""
    said: dict[str, str] = {}
    served = set()
    for outcome in outcomes:
        unit = outcome.parsed
        check = checks.find(unit.check)
        if outcome.state == "skipped" or (outcome.state in JUDGED and check.calls and not check.of_errors):
            served.add(unit.implementation)
        elif outcome.cause == DECLINED and check.smoke is None and not check.of_errors:
            said.setdefault(unit.implementation, outcome.message)
    return {name: message for name, message in said.items() if name not in served}


def unclaimed(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Implementations whose requirements, or what their calls are made of, leave no unit that claims anything, and the
    most frequent reason."""
    reasons: dict[str, Counter[str]] = {}
    others = set()
    for outcome in outcomes:
        name = outcome.parsed.implementation
        if outcome.state != "not_claimed" or outcome.cause:
            others.add(name)
        else:
            reasons.setdefault(name, Counter())[outcome.message] += 1
    return {name: found.most_common(1)[0][0] for name, found in reasons.items() if name not in others}


def unjudged(manager: OpManager, settings: Settings, outcomes: Sequence[Outcome]) -> list[Unjudged]:
    """Claims of the implementations under test that no unit judged."""
    ran = {(o.parsed.implementation, checks.find(o.parsed.check).claim) for o in outcomes if o.state in JUDGED}
    reasons: dict[tuple[str, str], list[str]] = {}
    for space, tested in _spaces_of(manager, settings):
        for one in tested:
            for claim in sorted(one.claims):
                if (one.id, claim) not in ran:
                    why = [check.applies(one, space) for check in checks.checks() if check.claim == claim]
                    reasons.setdefault((one.id, claim), []).extend(reason for reason in why if reason is not None)
    return [
        Unjudged(implementation, claim, found[0] if found else "no unit that judges it was run")
        for (implementation, claim), found in reasons.items()
    ]


def refused(
    manager: OpManager, settings: Settings, outcomes: Sequence[Outcome] = (), single: bool = False
) -> dict[str, str]:
    """Implementations of the backends under test that dispatch never calls, by id, and why: a word in the manifest that
    nothing here has, whichever operators were asked for, or a function that cannot be imported or does not fit, as a
    run found. One written for another version of an operator is none of them where its backend has one for this
    version, too.

    Args:
        outcomes: of the run.
        single: whether its units were named one by one: then of their implementations alone.
    """
    unbound = {outcome.parsed.implementation: outcome.message for outcome in outcomes if outcome.cause == REFUSED}
    if single:
        return unbound
    found: dict[str, str] = {}
    for backend in sorted(backends_of(manager, settings)):
        implementations = manager.snapshot.backends[backend].manifest.implementations
        ids = {f"{backend}.{one.name}": one for one in implementations}
        unusable = {**unbound, **manager.snapshot.unusable}
        served = {one.operator for name, one in ids.items() if name not in unusable}
        for name, one in ids.items():
            operator, why = OPERATORS.get(one.operator), unusable.get(name)
            other_version = operator is not None and one.operator_version != operator.version
            if why is None or (other_version and one.operator in served):
                continue
            if not settings.implementations or name in settings.implementations:
                found[name] = why
    return found


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


def _spaces_of(manager: OpManager, settings: Settings) -> Iterator[tuple[Space, list[Subject]]]:
    """Spaces of the operators that were asked for, and the implementations under test of each."""
    for operator in _operators(settings):
        tested = _tested(manager, settings, operator)
        for space in spaces(operator) if tested else ():
            yield space, tested


def _tested(manager: OpManager, settings: Settings, operator: str) -> list[Subject]:
    backends = backends_of(manager, settings)
    return [
        one
        for one in subjects(manager, OPERATORS[operator], device_of(settings))
        if one.id.partition(".")[0] in backends and (not settings.implementations or one.id in settings.implementations)
    ]


def _checks(settings: Settings) -> Sequence[checks.Check]:
    return [checks.find(name) for name in settings.checks] if settings.checks else checks.checks()


def _streamed(manager: OpManager, settings: Settings) -> Iterator[Unit]:
    """Units of every valid combination, made one by one."""
    wanted = _checks(settings)
    for space, tested in _spaces_of(manager, settings):
        if space.sampled and settings.level != "soak":
            continue
        main = [check for check in wanted if judges_every_case(check, space)]
        axes = {axis.name: axis.values for axis in space.axes}
        for values in covering.product(axes, space.valid):
            case = Case.of(space.operator, space.name, values, settings.seed)
            yield from (Unit(one.id, check.name, case) for check in main for one in tested)


def backends_of(manager: OpManager, settings: Settings) -> frozenset[str]:
    """The backends that a run certifies.

    Raises:
        UsageError: one of them, the oracle's, or an implementation that was named is not installed.
    """
    installed = set(manager.snapshot.backends)
    for name in (*settings.backends, settings.against):
        if name not in installed:
            absence = manager.snapshot.absence(name)  # not installed, or what was wrong with it
            raise UsageError(f"backend: {name!r} is {absence}; installed: {', '.join(sorted(installed)) or 'none'}")
    for candidate in settings.implementations:
        try:
            manager.snapshot.implementation(candidate)
        except KeyError:
            raise UsageError(f"implementation: {candidate!r} is not installed") from None
    emulating = emulating_backends(manager, settings)
    return frozenset(settings.backends or emulating or installed - {settings.against})


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
