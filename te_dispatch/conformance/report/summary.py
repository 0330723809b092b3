# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the page shows of a report: sums for what passed, details for what failed.

A page must open at once however long the run was. So passed units are added up per implementation, of which the one
nearest to its bound is kept whole, and failures beyond a number keep one line each. The JSON document has everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from te_dispatch.conformance.outcome import Outcome, counts, failed
from te_dispatch.conformance.report.record import Cell, Report
from te_dispatch.conformance.rules import HISTOGRAM
from te_dispatch.core.operator import OPERATORS

#: Failures that are shown with all their findings, of the whole page, and at least so many per implementation.
DETAILED, DETAILED_EACH = 240, 2
#: Failures whose line in the list has its message too.
WITH_MESSAGE = 1000
SLOWEST = 20
NOTES = 200


@dataclass(frozen=True)
class Implementation:
    """All outcomes of one implementation, added up.

    Attributes:
        id: e.g. ``torch.matmul``.
        counts: units by state, see `te_dispatch.conformance.outcome.counts`.
        checks: check -> the same for its units.
        histogram: elements of all passed units by log2(error / limit); empty where nothing has a bound.
        worst: the passed unit nearest to its bound, if one has any error.
        failures: in the plan's order.
        reasons: why units are not claimed -> how many.
        seconds: all units together.
    """

    id: str
    counts: dict[str, int]
    checks: dict[str, dict[str, int]]
    histogram: list[int]
    worst: Outcome | None
    failures: list[Outcome]
    reasons: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Family:
    """Rows of the matrix.

    Attributes:
        rows: operator -> backend -> cell; a backend without units of the operator has none.
    """

    name: str
    rows: dict[str, dict[str, Cell]]


@dataclass(frozen=True)
class Note:
    """Something that a check reports although it passed; `unit` is the first that says it."""

    implementation: str
    text: str
    unit: str
    count: int


@dataclass(frozen=True)
class Summary:
    """All that the page shows.

    Attributes:
        backends: of the matrix, in the plan's order.
        implementations: (operator, backend) -> the implementations of that cell.
        detailed: ids of the failed units that are shown with all their findings.
    """

    report: Report
    backends: list[str]
    families: list[Family]
    implementations: dict[tuple[str, str], list[Implementation]]
    failures: list[Outcome]
    detailed: frozenset[str]
    slowest: list[Outcome]
    notes: list[Note] = field(default_factory=list)
    notes_left_out: int = 0

    @property
    def cells(self) -> Iterator[tuple[Cell, list[Implementation]]]:
        for family in self.families:
            for row in family.rows.values():
                for cell in row.values():
                    yield cell, self.implementations[cell.operator, cell.backend]

    def histogram(self, operator: str, backend: str) -> list[int]:
        """Of a cell: elements of all passed units of all its implementations."""
        return _added([found.histogram for found in self.implementations[operator, backend]])

    def backend_counts(self, backend: str) -> dict[str, int]:
        """Units of one backend by state."""
        found: Counter[str] = Counter()
        for family in self.families:
            for row in family.rows.values():
                if backend in row:
                    found.update(row[backend].counts)
        return dict(found)


def summarize(report: Report) -> Summary:
    """Add a report up."""
    cells = list(report.cells())
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    implementations = {(cell.operator, cell.backend): _implementations(cell) for cell in cells}
    failing = [found.failures for group in implementations.values() for found in group if found.failures]
    ran = [outcome for outcome in report.outcomes if outcome.seconds > 0]
    notes = _notes(report.outcomes)
    return Summary(
        report=report,
        backends=backends,
        families=_families(cells, backends),
        implementations=implementations,
        failures=report.failures(),
        detailed=_detailed(failing),
        slowest=sorted(ran, key=lambda outcome: -outcome.seconds)[:SLOWEST],
        notes=notes[:NOTES],
        notes_left_out=max(0, len(notes) - NOTES),
    )


def _families(cells: list[Cell], backends: list[str]) -> list[Family]:
    found: dict[str, dict[str, dict[str, Cell]]] = {}
    order = {name: place for place, name in enumerate(OPERATORS)}
    for cell in sorted(cells, key=lambda c: (order.get(c.operator, len(order)), backends.index(c.backend))):
        operator = OPERATORS.get(cell.operator)
        rows = found.setdefault(operator.family if operator else "other", {})
        rows.setdefault(cell.operator, {})[cell.backend] = cell
    return [Family(name, rows) for name, rows in found.items()]


def _implementations(cell: Cell) -> list[Implementation]:
    grouped: dict[str, list[Outcome]] = {}
    for outcome in cell.outcomes:
        grouped.setdefault(outcome.parsed.implementation, []).append(outcome)
    return [_implementation(name, outcomes) for name, outcomes in grouped.items()]


def _implementation(name: str, outcomes: list[Outcome]) -> Implementation:
    by_check: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_check.setdefault(outcome.parsed.check, []).append(outcome)
    passed = [outcome for outcome in outcomes if outcome.state == "passed"]
    worst = max(passed, key=lambda outcome: outcome.ratio, default=None)
    return Implementation(
        id=name,
        counts=counts(outcomes),
        checks={check: counts(found) for check, found in by_check.items()},
        histogram=_added([finding.histogram for outcome in passed for finding in outcome.findings]),
        worst=worst if worst is not None and worst.ratio > 0 else None,
        failures=[outcome for outcome in outcomes if failed(outcome)],
        reasons=dict(Counter(outcome.message for outcome in outcomes if outcome.state == "not_claimed").most_common()),
        seconds=sum(outcome.seconds for outcome in outcomes),
    )


def _added(histograms: list[list[int]]) -> list[int]:
    whole = [histogram for histogram in histograms if len(histogram) == len(HISTOGRAM) + 1]
    return [sum(bins) for bins in zip(*whole)]


def _detailed(failing: list[list[Outcome]]) -> frozenset[str]:
    """An equal share for every implementation: the plainest cases, which come first, and the one that errs most."""
    each = max(DETAILED_EACH, DETAILED // len(failing)) if failing else 0
    chosen: list[str] = []
    for outcomes in failing:
        worst = max(outcomes, key=lambda outcome: outcome.ratio)
        chosen += dict.fromkeys(outcome.unit for outcome in [worst, *outcomes][:each])
    return frozenset(chosen[:DETAILED])


def _notes(outcomes: list[Outcome]) -> list[Note]:
    found: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for text in outcome.notes:
            found.setdefault((outcome.parsed.implementation, text), []).append(outcome.unit)
    return [Note(name, text, units[0], len(units)) for (name, text), units in found.items()]
