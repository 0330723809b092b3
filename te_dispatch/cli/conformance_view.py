# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A conformance run in the terminal: how far it is, and what came of it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from te_dispatch.cli.console import err, out
from te_dispatch.conformance import certification
from te_dispatch.conformance.outcome import Outcome, failed
from te_dispatch.conformance.planning import Planning
from te_dispatch.conformance.report.record import Cell, Report
from te_dispatch.core.operator import OPERATORS

#: Failures that the terminal shows in full, and reasons per implementation; all are in the files.
_FAILURES, _REASONS = 10, 3
#: Of so many units or fewer, what was judged is shown too: somebody looks at one of them.
_LOOKED_AT = 3
#: Seconds between lines of progress where standard error is a file: a log is no place for a moving bar.
_LINE_S = 5.0
#: Lines of progress over which the speed is measured: units of different operators take different times.
_SPEED_LINES = 24
_COLOURS = {"passed": "green", "failed": "red", "not_claimed": "dim"}


@dataclass(frozen=True)
class Told:
    """What to call on the way: `unit` after every unit, `planning` before every space is planned."""

    unit: certification.Progress
    planning: Planning


@contextmanager
def progress(quiet: bool) -> Iterator[Told]:
    """What to tell on the way: a bar on a terminal, every few seconds a line elsewhere, or nothing."""
    console = err()
    if quiet:
        yield Told(lambda outcome, done, total: None, lambda operator, done, total: None)
    elif console.is_terminal:
        with _bar(console) as told:
            yield told
    else:
        with _lines(console) as told:
            yield told


@contextmanager
def _bar(console: Console) -> Iterator[Told]:
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[failures]}", style="red"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("planning", total=None, failures="")
        failures = 0

        def planning(operator: str, done: int, total: int) -> None:
            bar.update(task, total=total, completed=done, description=f"planning {operator[:23]:<23}")

        def told(outcome: Outcome, done: int, total: int | None) -> None:
            nonlocal failures
            if failed(outcome):
                failures += 1
                if failures <= _FAILURES:
                    bar.console.print(_failure(outcome.unit, outcome.message), soft_wrap=True)
            words = f"{failures} failed" if failures else ""
            name = outcome.parsed.implementation
            bar.update(task, total=total, completed=done, description=f"{name[:32]:<32}", failures=words)

        yield Told(told, planning)


@contextmanager
def _lines(console: Console) -> Iterator[Told]:
    """How many units there are, a line every few seconds, also while a single unit runs long, and one at the end."""
    failures, words, printed = 0, "", ""
    ran = False
    over = threading.Event()
    speed = Speed()

    def planning(operator: str, done: int, total: int) -> None:
        nonlocal words
        words = f"planning {operator}, {done} of {total} spaces planned"

    def told(outcome: Outcome, done: int, total: int | None) -> None:
        nonlocal failures, words, ran
        if not ran and total:
            console.print(Text(f"{total} units"))
        ran = True
        speed.ran += outcome.seconds > 0
        speed.waiting = total - done if total else 0
        failures += failed(outcome)
        words = f"{done} of {total} units, {failures} failed" if total else f"{done} units, {failures} failed"

    def tell() -> None:
        nonlocal printed
        while not over.wait(_LINE_S):
            printed = words
            left = speed.left(time.monotonic())
            console.print(Text((words or "planning") + (f", about {left} left" if left else "")))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield Told(told, planning)
    finally:
        over.set()
        thread.join()
        if ran and words != printed:
            console.print(Text(words))


class Speed:
    """How long a run goes on, by how many units ran in the last two minutes.

    Attributes:
        ran: units so far, without those whose outcome was known before.
        waiting: units that are still to come; 0 where nobody knows.
    """

    def __init__(self) -> None:
        self.ran = self.waiting = 0
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_SPEED_LINES)

    def left(self, now: float) -> str:
        """The remaining time in words; empty as long as there is nothing to tell it by."""
        if not self.ran:
            return ""
        self._seen.append((now, self.ran))
        first, before = self._seen[0]
        if len(self._seen) < 3 or self.ran == before or not self.waiting:
            return ""
        seconds = self.waiting * (now - first) / (self.ran - before)
        return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def show(report: Report) -> None:
    """The matrix, what is not claimed, the first failures, and the sum."""
    console = out()
    asked = report.settings
    title = f"Claimed cases, and their worst error over its bound, against {asked.against}, level {asked.level}"
    console.print(Text(title, style="bold"))
    console.print(_matrix(report))
    _not_claimed(console, report)
    _never_served(console, report)
    _coverage(console, report)
    failures = report.failures()
    for outcome in failures[:_FAILURES]:
        console.print(_failure(outcome.unit, outcome.message), soft_wrap=True)
        console.print(Text(f"  {report.reproducer(outcome)}", style="dim"), soft_wrap=True)
    if len(failures) > _FAILURES:
        console.print(Text(f"... and {len(failures) - _FAILURES} more failures, all of them in the files", style="red"))
    if len(report.outcomes) <= _LOOKED_AT:
        for outcome in report.outcomes:
            _judged(console, outcome)
    console.print(sentence(report))
    if not report.single:
        style = "green" if not report.uncertified else "yellow" if report.ok else "red"
        console.print(Text(report.certificate, style=style))


def sentence(report: Report) -> Text:
    """The counts, and whether that is good."""
    counts = report.counts
    always = ("claimed", "passed", "failed", "not_claimed")
    words = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in always)
    rest = ("skipped", "expected_failure", "unexpected_pass")
    words += "".join(f", {counts[name]} {name.replace('_', ' ')}" for name in rest if counts[name])
    if not counts["claimed"]:
        words += ": nothing was claimed, so nothing is certified"
    return Text(words, style="green" if report.ok else "red")


def _matrix(report: Report) -> Table:
    cells = {(cell.operator, cell.backend): cell for cell in report.cells()}
    backends = list(dict.fromkeys(backend for _, backend in cells))
    table = Table()
    table.add_column("operator", no_wrap=True)
    for backend in backends:
        table.add_column(backend)
    family = None
    for operator in dict.fromkeys(operator for operator, _ in cells):
        this = OPERATORS[operator].family if operator in OPERATORS else "other"
        if family not in (None, this):
            table.add_section()
        family = this
        table.add_row(operator, *(_cell(cells.get((operator, backend))) for backend in backends))
    return table


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("-", style="dim")
    counts = cell.counts
    if cell.state == "not_claimed":
        return Text("not claimed", style="dim")
    bad = counts["failed"] + counts["unexpected_pass"]
    words = f"{bad} of {counts['claimed']} failed" if bad else f"{counts['passed']} passed"
    worst = cell.worst
    if worst is not None and 0 < worst.ratio < float("inf"):
        words += f", {worst.ratio:.2g}"
    words += f", {counts['expected_failure']} known" if counts["expected_failure"] else ""
    return Text(words, style=_COLOURS[cell.state])


def _not_claimed(console: Console, report: Report) -> None:
    found = report.not_claimed()
    if not found:
        return
    console.print(Text("Not claimed", style="bold"))
    table = Table()
    table.add_column("implementation", overflow="fold")
    table.add_column("cases", justify="right")
    table.add_column("reason", overflow="fold", ratio=1)
    for implementation, reasons in found.items():
        ordered = sorted(reasons.items(), key=lambda item: -item[1])
        for place, (reason, count) in enumerate(ordered[:_REASONS]):
            table.add_row(implementation if place == 0 else "", str(count), Text(reason))
        if len(ordered) > _REASONS:
            left = sum(count for _, count in ordered[_REASONS:])
            table.add_row("", str(left), Text(f"{len(ordered) - _REASONS} more reasons, in the files", style="dim"))
    console.print(table)


def _never_served(console: Console, report: Report) -> None:
    """Implementations of which nothing was judged: refused, always declining, or claiming nothing."""
    for title, found, style in (
        ("Refused, and never called", report.refused, "red"),
        ("Declines every call that it claims", report.declining, "red"),
    ):
        if found:
            console.print(Text(title, style=f"bold {style}"))
        for name, why in found.items():
            console.print(Text(f"  {name}: {why}", style=style), soft_wrap=True)
    if report.unclaimed:
        where = "on this device" if report.settings.level != "smoke" else "in any case of level smoke"
        console.print(Text(f"Not claimed {where}: {', '.join(report.unclaimed)}", style="dim"), soft_wrap=True)


def _coverage(console: Console, report: Report) -> None:
    """What is claimed and was not run, and claims that no unit judged."""
    left = report.never_run
    if left:
        console.print(Text("Claimed but never run", style="bold red"))
        for implementation, goals in left.items():
            for goal in goals[:_FAILURES]:
                console.print(Text(f"  {implementation}: {goal}", style="red"), soft_wrap=True)
            if len(goals) > _FAILURES:
                console.print(Text(f"  {implementation}: {len(goals) - _FAILURES} more, in the files", style="red"))
    if report.unjudged:
        console.print(Text("Claims that were not judged", style="bold"))
        grouped: dict[tuple[str, str], list[str]] = {}
        for one in report.unjudged:
            grouped.setdefault((one.claim, one.reason), []).append(one.implementation)
        for (claim, reason), names in grouped.items():
            shown = ", ".join(names[:_REASONS]) + (f" and {len(names) - _REASONS} more" if names[_REASONS:] else "")
            console.print(Text(f"  {claim} of {shown}: {reason}", style="yellow"), soft_wrap=True)


def _failure(unit: str, message: str) -> Text:
    return Text(f"FAILED {unit}\n  {message}", style="red")


def _judged(console: Console, outcome: Outcome) -> None:
    """What one unit's results were compared with, element by element."""
    if not outcome.findings:
        return
    console.print(Text(f"{outcome.state.replace('_', ' ')}: {outcome.unit}"))
    table = Table()
    for name in ("result", "rule", "error / bound", "wrong", "worst at", "actual", "expected", "limit"):
        table.add_column(name, overflow="fold", justify="right" if name in ("error / bound", "wrong") else "left")
    for finding in outcome.findings:
        table.add_row(
            Text(finding.path), finding.rule, f"{finding.ratio:.3g}", f"{finding.bad} of {finding.total}",
            Text(str(list(finding.index)) if finding.index else ""), finding.actual, finding.expected, finding.limit,
            style="" if finding.passed else "red",
        )  # fmt: skip
    console.print(table)
    for note in outcome.notes:
        console.print(Text(note))
