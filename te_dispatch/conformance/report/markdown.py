# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The report in a few tables, for a pull request, a CI job's summary, or a project's own documentation."""

from __future__ import annotations

from pathlib import Path

from te_dispatch.conformance.report.record import Cell, Report
from te_dispatch.core import files

#: Reasons that are shown of one implementation; the JSON has all.
_REASONS = 3


def save(report: Report, path: str | Path) -> None:
    """Write the tables."""
    files.replace(path, render(report))


def render(report: Report) -> str:
    """Verdict, machine, operators x backends, failures, and what is not claimed with its reasons."""
    counts, settings, machine = report.counts, report.settings, report.environment
    backends = list(dict.fromkeys(cell.backend for cell in report.cells()))
    verdict = "certified" if not report.uncertified else "passed" if report.ok else "failed"
    lines = [
        f"### {', '.join(backends) or 'nothing'} against {settings.against}, level {settings.level}: {verdict}",
        "",
        f"{counts['claimed']} claimed, {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['not_claimed']} not claimed. {_text(machine['device'])}, PyTorch {machine['torch']}, Python "
        f"{machine['python']}, te_dispatch {machine['te_dispatch']}, {report.date[:10]}.",
        "",
        *([f"No certificate: {_text('; '.join(report.uncertified))}.", ""] if report.uncertified else []),
        *_matrix(report, backends),
        *_coverage(report),
    ]
    failures = report.failures()
    if failures:
        lines += ["", "| failure | message |", "|---|---|"]
        lines += [f"| `{_code(outcome.unit)}` | {_cell(outcome.message)} |" for outcome in failures]
    return "\n".join([*lines, *_not_claimed(report)]) + "\n"


def _matrix(report: Report, backends: list[str]) -> list[str]:
    cells = {(cell.operator, cell.backend): cell for cell in report.cells()}
    head = ["| operator | " + " | ".join(backends) + " |", "|---" * (len(backends) + 1) + "|"]
    operators = dict.fromkeys(operator for operator, _ in cells)
    return head + [
        f"| {operator} | " + " | ".join(_words(cells.get((operator, backend))) for backend in backends) + " |"
        for operator in operators
    ]


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    counts, worst = cell.counts, cell.worst
    if cell.state == "not_claimed":
        return "not claimed"
    ratio = f", {worst.ratio:.2f} of the bound" if worst is not None and 0 < worst.ratio < float("inf") else ""
    return f"{counts['passed']} of {counts['claimed']}{ratio}"


def _coverage(report: Report) -> list[str]:
    """What was judged of what is claimed, what was never run, and claims that nothing judged."""
    lines = []
    if report.coverage:
        lines += ["", "| implementation | values | pairs | groups | triples |", "|---|---|---|---|---|"]
        for one in report.covered():
            of = (one.values, one.pairs, one.groups, one.triples)
            lines.append(f"| {one.implementation} | " + " | ".join(f"{n} of {all_}" for n, all_ in of) + " |")
    if report.unclaimed:
        words = "not claimed on this device" if report.settings.level != "smoke" else "not claimed in any case of smoke"
        lines += ["", f"| implementation | {words} |", "|---|---|"]
        lines += [f"| {name} | {_cell(why)} |" for name, why in report.unclaimed.items()]
    if report.never_run:
        lines += ["", "| implementation | claimed but never run |", "|---|---|"]
        lines += [f"| {name} | {_cell(goal)} |" for name, left in report.never_run.items() for goal in left]
    if report.unjudged:
        lines += ["", "| implementation | claim that was not judged | reason |", "|---|---|---|"]
        lines += [f"| {one.implementation} | {one.claim} | {_cell(one.reason)} |" for one in report.unjudged]
    return lines


def _not_claimed(report: Report) -> list[str]:
    found = report.not_claimed()
    if not found:
        return []
    lines = ["", "| implementation | cases not claimed | most frequent reasons |", "|---|---|---|"]
    for implementation, reasons in found.items():
        ordered = sorted(reasons, key=lambda reason: -reasons[reason])
        shown = "; ".join(f"{_cell(reason)} ({reasons[reason]})" for reason in ordered[:_REASONS])
        more = f"; {len(ordered) - _REASONS} more" if ordered[_REASONS:] else ""
        lines.append(f"| {implementation} | {sum(reasons.values())} | {shown}{more} |")
    return lines


def _cell(text: str) -> str:
    """Text that neither ends a table's cell nor is read as HTML: messages hold what a plugin wrote."""
    return _text(text).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    """The same between backticks, where HTML is not read."""
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
