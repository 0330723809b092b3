# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""JUnit XML, which every CI system reads: one suite per implementation, one case per unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from te_dispatch.conformance.outcome import Outcome, failed
from te_dispatch.conformance.report.record import Report
from te_dispatch.core import files

#: Characters that XML 1.0 cannot hold, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def save(report: Report, path: str | Path) -> None:
    """Write the report. Units that are not claimed are skipped cases, with the reason, never passed ones."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        grouped.setdefault(outcome.parsed.implementation, []).append(outcome)
    root = ElementTree.Element("testsuites", name="te_dispatch conformance")
    for implementation, outcomes in grouped.items():
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=implementation,
            tests=str(len(outcomes)),
            failures=str(sum(map(failed, outcomes))),
            errors="0",
            skipped=str(sum(not failed(o) and o.state != "passed" for o in outcomes)),
            time=f"{sum(o.seconds for o in outcomes):.3f}",
            timestamp=report.date,
        )
        for outcome in outcomes:
            _case(suite, outcome, report)
    for implementation, left in report.never_run.items():
        _left_out(root, report, implementation, "claimed but never run", "never_run", left)
    for implementation, why in report.refused.items():
        _left_out(root, report, implementation, "refused", "refused", [_FORBIDDEN.sub("?", why)])
    for implementation, why in report.declining.items():
        words = "declines every call that it claims"
        _left_out(root, report, implementation, words, "declining", [_FORBIDDEN.sub("?", why)])
    text = ElementTree.tostring(root, encoding="unicode")
    files.replace(path, f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n')


def _left_out(
    root: ElementTree.Element, report: Report, implementation: str, words: str, kind: str, names: Sequence[str]
) -> None:
    """A suite of failures without a unit behind them."""
    suite = ElementTree.SubElement(
        root, "testsuite", name=f"{implementation} {words}", tests=str(len(names)),
        failures=str(len(names)), errors="0", skipped="0", time="0", timestamp=report.date,
    )  # fmt: skip
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname=f"{implementation}.{kind}", name=name, time="0")
        ElementTree.SubElement(case, "failure", message=words, type=kind)


def _case(suite: ElementTree.Element, outcome: Outcome, report: Report) -> None:
    unit = outcome.parsed
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{unit.implementation}.{unit.check}",
        name=unit.case.id,
        time=f"{outcome.seconds:.3f}",
    )
    message = _FORBIDDEN.sub("?", outcome.message)
    if failed(outcome):
        failure = ElementTree.SubElement(case, "failure", message=message, type=outcome.state)
        failure.text = f"{message}\n{_FORBIDDEN.sub('?', report.reproducer(outcome))}"
    elif outcome.state != "passed":
        ElementTree.SubElement(case, "skipped", message=f"{outcome.state.replace('_', ' ')}: {message}")
