# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A whole run: plan, expectations, what an interrupted run already did, outcomes, report. All doors lead here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Union

from te_dispatch.conformance import journal, running
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.emulated import device_entered, emulated_device
from te_dispatch.conformance.expectations import Expectations
from te_dispatch.conformance.journal import Journal
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import (
    Plan,
    Planning,
    covered,
    declining,
    further,
    named,
    plan,
    refused,
    unclaimed,
    unjudged,
)
from te_dispatch.conformance.report.record import Report, environment
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes
from te_dispatch.core.manager import OpManager
from te_dispatch.core.trial import refuse_fatal, refuse_fatal_targets

#: Told of every outcome as it comes: (outcome, how many are done, how many there are; None where nobody knows).
Progress = Callable[[Outcome, int, Union[int, None]], None]


def certify(
    backend: str | Sequence[str] = (),
    *,
    op: str | Sequence[str] = (),
    level: str = "smoke",
    against: str = "reference",
    settings: Settings | None = None,
    units: Sequence[Unit] | None = None,
    skip_file: str | None = None,
    expected_failures_file: str | None = None,
    journal_file: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    planning: Planning | None = None,
    manager: OpManager | None = None,
) -> Report:
    """Certify backends.

    Args:
        backend, op, level, against: as in `Settings`; a name or several.
        settings: all of a run's settings; the four before then only override where given.
        units: run just these, instead of what the settings plan.
        skip_file, expected_failures_file: see `te_dispatch.conformance.expectations`.
        journal_file: keeps each outcome as it comes; with `resume`, those that it holds are not run again.
        progress, planning: called after every unit, and before the plan of every space.
        manager: whose registry the plan is made from; workers use their own process's.

    Raises:
        UsageError: something was asked for that does not exist.
        WorkerError, OracleError: the kit cannot go on.
        FatalPlugin: an installed backend's manifest or probe, or a module of a backend that is to be certified, ends
            the process that runs it.
    """
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    operators = (op,) if isinstance(op, str) else tuple(op)
    settings = settings or Settings(names, against, operators, level)
    manager = manager or scopes.MANAGER
    if manager is scopes.MANAGER:
        refuse_fatal(None if emulated_device(settings) else settings.device)
        refuse_fatal_targets(manager.snapshot, settings.backends)
    with device_entered(manager, settings):
        return _certified(
            manager, settings, units, skip_file, expected_failures_file, journal_file, resume, progress, planning
        )


def _certified(
    manager: OpManager,
    settings: Settings,
    units: Sequence[Unit] | None,
    skip_file: str | None,
    expected_failures_file: str | None,
    journal_file: str | Path | None,
    resume: bool,
    progress: Progress | None,
    planning: Planning | None,
) -> Report:
    started = time.monotonic()
    # Before the plan, which takes a minute at level full.
    expectations = Expectations.load(skip_file, expected_failures_file)
    facts = environment(manager, settings)
    known = journal.known(journal_file, settings, facts) if resume and journal_file is not None else {}
    if units is not None:
        planned = Plan(named(manager, settings, units))
    else:
        planned = plan(manager, settings, planning)
    chosen = planned.units if isinstance(planned.units, Sequence) else ()
    expectations.check(chosen, lambda: _whole(manager, settings))
    report = Report(settings, facts, [], single=units is not None)
    with journal.opened(journal_file, settings, facts, known) as kept:
        run = _Run(report, planned, expectations, kept, progress)
        run.do(planned)
        complete(manager, report, planned, run.do)
    if units is None and not settings.product:
        report.unjudged = unjudged(manager, settings, report.outcomes)
    report.seconds = time.monotonic() - started
    return report


#: How often cases are planned again for what implementations declined when they were called.
ROUNDS = 3


def complete(manager: OpManager, report: Report, planned: Plan, do: Callable[[Plan], None]) -> None:
    """Run cases in place of those that implementations declined when they were called, and add up what was judged, what
    dispatch never calls, and which implementations never serve.

    Args:
        report: of the whole plan; gains a coverage where the plan has one.
        do: runs a plan and adds its outcomes to the report.
    """
    whole = report.settings.shard == (1, 1)
    coverage = planned.coverage if whole else ()
    for left in reversed(range(ROUNDS + 1 if coverage else 0)):
        more = further(manager, report.settings, report.outcomes, coverage)
        coverage = more.coverage
        if not more.units or not left:
            break
        do(more)
    report.coverage = covered(coverage, report.outcomes)
    report.refused = refused(manager, report.settings, report.outcomes, report.single)
    if whole and not report.single:
        report.declining = declining(report.outcomes)
        report.unclaimed = {name: why for name, why in unclaimed(report.outcomes).items() if name not in report.refused}


def _whole(manager: OpManager, settings: Settings) -> Iterable[Unit]:
    """The units of level full, which patterns of expectation files are held against."""
    return plan(manager, dataclasses.replace(settings, level="full", shard=(1, 1), product=False)).units


class _Run:
    """Takes outcomes from wherever they come: the journal, the files of expectations, the plan, or a run."""

    def __init__(
        self, report: Report, planned: Plan, expectations: Expectations, kept: Journal, progress: Progress | None
    ) -> None:
        self._report, self._expectations, self._kept, self._progress = report, expectations, kept, progress
        self._done = 0
        self._total = 0
        self._streamed = not isinstance(planned.units, Sequence)

    def do(self, planned: Plan) -> None:
        """Run what is not known yet. The report's outcomes come in the plan's order."""
        units = planned.units
        begin = len(self._report.outcomes)
        if isinstance(units, Sequence):
            self._total += len(units)
        waiting = self._left(planned)
        for outcome in running.run(waiting if self._streamed else list(waiting), self._report.settings):
            judged = self._expectations.judged(outcome)
            self._kept.add(judged)
            self._take(judged)
        if isinstance(units, Sequence):
            order = {unit.id: place for place, unit in enumerate(units)}
            own = sorted(self._report.outcomes[begin:], key=lambda outcome: order[outcome.unit])
            self._report.outcomes[begin:] = own

    def _left(self, planned: Plan) -> Iterator[Unit]:
        for unit in planned.units:
            known = self._kept.get(unit.id) or self._expectations.skipped(unit)
            if known is None and unit.id in planned.decided:
                known = planned.decided[unit.id]
                self._kept.add(known)
            if known is None:
                yield unit
            else:
                self._take(known)

    def _take(self, outcome: Outcome) -> None:
        self._done += 1
        if self._streamed and outcome.state in ("passed", "not_claimed"):
            self._report.add_up(outcome)
        else:
            self._report.outcomes.append(outcome)
        if self._progress is not None:
            self._progress(outcome, self._done, None if self._streamed else self._total)
