# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A whole run: plan, expectations, what an interrupted run already did, outcomes, report. All doors lead here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from te_dispatch.conformance import journal, running
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.expectations import Expectations
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import named, plan
from te_dispatch.conformance.report.record import Report, environment
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes
from te_dispatch.core.manager import OpManager

#: Told of every outcome as it comes: (outcome, how many are done, how many there are).
Progress = Callable[[Outcome, int, int], None]


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
    manager: OpManager | None = None,
) -> Report:
    """Certify backends.

    Args:
        backend, op, level, against: as in `Settings`; a name or several.
        settings: all of a run's settings; the four before then only override where given.
        units: run just these, instead of what the settings plan.
        skip_file, expected_failures_file: see `te_dispatch.conformance.expectations`.
        journal_file: keeps each outcome as it comes; with `resume`, those that it holds are not run again.
        progress: called after every unit.
        manager: whose registry the plan is made from; workers use their own process's.

    Raises:
        UsageError: something was asked for that does not exist.
        WorkerError, OracleError: the kit cannot go on.
    """
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    operators = (op,) if isinstance(op, str) else tuple(op)
    settings = settings or Settings(names, against, operators, level)
    manager = manager or scopes.MANAGER
    planned = named(manager, settings, units) if units is not None else plan(manager, settings)
    expectations = Expectations.load(skip_file, expected_failures_file)
    expectations.check(planned, lambda: plan(manager, dataclasses.replace(settings, level="full", shard=(1, 1))))
    facts = environment(manager, settings)
    report = Report(settings, facts, [])
    with journal.opened(journal_file, settings, facts, resume) as kept:
        waiting = []
        for unit in planned:
            known = kept.get(unit.id) or expectations.skipped(unit)
            if known is None:
                waiting.append(unit)
            else:
                _take(report, known, len(planned), progress)
        for outcome in running.run(waiting, settings):
            judged = expectations.judged(outcome)
            kept.add(judged)
            _take(report, judged, len(planned), progress)
    order = {unit.id: place for place, unit in enumerate(planned)}
    report.outcomes.sort(key=lambda outcome: order[outcome.unit])
    return report


def _take(report: Report, outcome: Outcome, total: int, progress: Progress | None) -> None:
    report.outcomes.append(outcome)
    if progress is not None:
        progress(outcome, len(report.outcomes), total)
