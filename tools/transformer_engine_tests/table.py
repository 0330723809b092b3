# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the runs of several files came to: counts and reasons for each function, as data and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from outcomes import OUTCOMES

#: How many reasons a row of the table quotes, and how much of each; the data has all of them.
_QUOTED, _LENGTH = 3, 110


def read(path: Path, exit_code: int) -> dict[str, dict[str, Any]]:
    """The functions of one file of tests by name, from the lines of `outcomes.Outcomes`.

    ``cases`` is how many cases a function has; those that ran are counted by outcome.
    """
    functions: dict[str, dict[str, Any]] = {}
    started = None
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        outcome, name = entry["outcome"], entry["function"]
        row = functions.setdefault(name, {"cases": 0, **dict.fromkeys(OUTCOMES, 0), "reasons": Counter()})
        if outcome == "collected":
            row["cases"] = int(entry["case"])
        elif outcome == "started":
            started = (name, entry["case"])
        else:
            started = None
            row[outcome] += 1
            if entry["reason"]:
                row["reasons"][outcome, entry["reason"]] += 1
    if started is not None:
        functions[started[0]]["failed"] += 1
        functions[started[0]]["reasons"]["failed", f"the process ended ({exit_code}) in {started[1]}"] += 1
    elif not functions:
        reasons = Counter({("failed", f"no test ran, pytest ended with {exit_code}"): 1})
        functions["(import)"] = {"cases": 0, **dict.fromkeys(OUTCOMES, 0), "failed": 1, "reasons": reasons}
    for row in functions.values():
        found = row["reasons"].most_common()
        row["reasons"] = [{"outcome": kind, "reason": reason, "cases": count} for (kind, reason), count in found]
    return functions


def markdown(report: dict[str, Any]) -> str:
    """A table of the files, then one of the functions of each."""
    of = f"{report['of']}, " if report["of"] else ""
    lines = [f"{of}{report['date']}, {report['machine']}.", "", _head("file", "functions", "cases run")]
    for file, functions in report["files"].items():
        rows = [row for row in functions.values() if _ran(row)]
        lines.append(_row(file, len(rows), sum(map(_ran, rows)), *(sum(r[kind] for r in rows) for kind in OUTCOMES)))
    for file, functions in report["files"].items():
        lines += ["", f"### {file}", "", _head("function", "cases run", end=("why not",))]
        for name, row in functions.items():
            if not _ran(row):
                continue
            ran = f"{_ran(row)} of {row['cases']}" if _ran(row) < row["cases"] else _ran(row)
            lines.append(_row(f"`{name}`", ran, *(row[kind] for kind in OUTCOMES), _reasons(row["reasons"])))
        if left := [f"`{name}`" for name, row in functions.items() if not _ran(row)]:
            lines += ["", f"Not run: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def _ran(row: dict[str, Any]) -> int:
    return sum(row[kind] for kind in OUTCOMES)


def _head(*first: str, end: tuple[str, ...] = ()) -> str:
    names = (*first, *OUTCOMES, *end)
    return _row(*names) + "\n" + "|" + "---|" * len(names)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _reasons(reasons: list[dict[str, Any]]) -> str:
    texts = []
    for entry in reasons[:_QUOTED]:
        reason = entry["reason"].replace("|", "\\|")
        cut = reason if len(reason) <= _LENGTH else reason[:_LENGTH] + "…"
        texts.append(f"{entry['outcome']}: {cut} ({entry['cases']})")
    if len(reasons) > _QUOTED:
        texts.append(f"{len(reasons) - _QUOTED} more")
    return "; ".join(texts)
