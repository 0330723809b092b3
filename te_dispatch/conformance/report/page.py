# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The report as one HTML page that needs nothing else: style, script and drawings are inside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.outcome import STATES, Outcome, failed
from te_dispatch.conformance.report import drawing, summary
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.rules import HEAT_MAP_LARGEST, HISTOGRAM, Finding
from te_dispatch.core import files

#: A message is cut there; the JSON document has all of it.
_LONG, _BRIEF = 2000, 160
#: Findings of a failed unit that are shown: those that failed first.
_FINDINGS, _HEAT_MAPS = 12, 3
#: Facts of the environment that the header shows first, in this order; the rest follow.
_FIRST = ("device", "arch", "te_dispatch", "torch", "python", "numpy", "platform")


def save(report: Report, path: str | Path) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
    """
    # What a plugin printed may hold lone surrogates, which UTF-8 has no bytes for.
    files.replace(path, render(report).encode("utf-8", "backslashreplace").decode("utf-8"))


def render(report: Report) -> str:
    """The page's text."""
    template = _environment().get_template("page.html.jinja")
    found = summary.summarize(report)
    names = {(cell.operator, cell.backend): f"cell-{number}" for number, (cell, _) in enumerate(found.cells)}
    return template.render(
        report=report,
        summary=found,
        cell_ids=names,
        verdict=_verdict(report),
        scope=_scope(report),
        facts=_facts(report),
        failure_ids={unit: f"failure-{number}" for number, unit in enumerate(sorted(found.detailed))},
        operator_of={outcome.unit: outcome.parsed.case.operator for outcome in found.failures},
        with_message=summary.WITH_MESSAGE,
        states=STATES,
        bins=len(HISTOGRAM) + 1,
        largest=HEAT_MAP_LARGEST,
        bound_at=HISTOGRAM.index(0) + 1,
        alphabet=drawing.ALPHABET,
        lowest=drawing.LOWEST,
        bar_width=drawing.BAR_WIDTH,
        bar_height=drawing.BAR_HEIGHT,
        edges=HISTOGRAM,
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        brief=lambda text: _cut(text, _BRIEF),
        long=lambda text: _cut(text, _LONG),
        ratio=drawing.short,
        seconds=lambda value: f"{value:.3f} s" if value < 1 else f"{value:.1f} s",
        state=lambda name: name.replace("_", " "),
        number=lambda value: f"{value:,}",
        unit=Unit.parse,
    )
    environment.globals.update(
        bars=drawing.bars,
        breakable=markupsafe.Markup("_<wbr>"),
        sparkline=drawing.sparkline,
        shade=drawing.shade,
        heat=drawing.heat,
        worst_tile=drawing.worst_tile,
        shown_findings=_shown_findings,
        heat_maps=_heat_maps,
        failed=failed,
    )
    return environment


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _verdict(report: Report) -> tuple[str, str]:
    """A word and its sentence."""
    counts = report.counts
    bad = counts["failed"] + counts["unexpected_pass"]
    if bad:
        return "failed", f"{bad:,} of {counts['claimed']:,} claimed cases failed."
    if report.refused:
        return "failed", f"Refused, and never called: {'; '.join(f'{n}: {why}' for n, why in report.refused.items())}."
    if report.declining:
        return "failed", f"These decline every call that they claim: {', '.join(report.declining)}."
    if not counts["claimed"]:
        return "nothing claimed", "No implementation claims any of these cases, so nothing is certified."
    if report.never_run:
        left = sum(map(len, report.never_run.values()))
        return "failed", f"{left:,} combinations of values are claimed but were never run."
    if counts["expected_failure"]:
        known = f"{counts['expected_failure']:,} fail as the vendor's file says"
        return "passed", f"Of {counts['claimed']:,} claimed cases {known}; all others passed."
    if report.uncertified:
        return (
            "passed",
            f"All {counts['claimed']:,} claimed cases passed. No certificate: {'; '.join(report.uncertified)}.",
        )
    return "certified", f"All {counts['claimed']:,} claimed cases passed, and all that is claimed was judged."


def _scope(report: Report) -> list[tuple[str, str]]:
    """What was asked for, and everything that makes it less than a whole certification."""
    asked = report.settings
    rows = [
        ("date", _readable(report.date)),
        ("level", asked.level),
        ("seed", str(asked.seed)),
        ("against", asked.against),
        ("units", f"{sum(report.counts[state] for state in STATES):,}"),
    ]
    if report.seconds:
        rows.append(("took", f"{report.seconds / 60:.1f} min, {asked.jobs} workers"))
    if asked.operators:
        rows.append(("only operators", ", ".join(asked.operators)))
    if asked.implementations:
        rows.append(("only", ", ".join(asked.implementations)))
    if asked.checks:
        rows.append(("only checks", ", ".join(asked.checks)))
    if asked.shard != (1, 1):
        rows.append(("only part", "{} of {}".format(*asked.shard)))
    if asked.product:
        rows.append(("cases", "every combination"))
    return rows


def _readable(date: str) -> str:
    return date.replace("T", " ").replace("+00:00", " UTC")


def _facts(report: Report) -> list[tuple[str, str]]:
    known = {name: value for name, value in report.environment.items() if name not in ("backends", "code")}
    ordered = [*(name for name in _FIRST if name in known), *(name for name in known if name not in _FIRST)]
    found: dict[str, str] = {}
    for name in ordered:
        # A device's plugin may tell a version that the process's own facts hold already.
        found.setdefault(name.removeprefix("version."), str(known[name]))
    return list(found.items())


def _shown_findings(outcome: Outcome) -> list[Finding]:
    return sorted(outcome.findings, key=lambda finding: (finding.passed, -finding.ratio))[:_FINDINGS]


def _heat_maps(outcome: Outcome) -> Iterator[tuple[Finding, dict[str, Any]]]:
    """Findings with a map worth looking at: one tile says no more than the table does."""
    drawn = [finding for finding in outcome.findings if finding.heat_map and finding.total > 1]
    for finding in drawn[:_HEAT_MAPS]:
        yield finding, {"rows": len(finding.heat_map), "columns": len(finding.heat_map[0])}
