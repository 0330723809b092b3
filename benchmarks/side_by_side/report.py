# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Records of benchmarks as JSON, as tables for a terminal, and as Markdown.

    python benchmarks/side_by_side/report.py results/FILE.json        -> Markdown

A record is ``{"benchmark", "machine", "rivals": {name: why it is missing, or null}, "tables": [{"title", "columns",
"rows"}], ...}``: whatever prints it needs to know nothing about benchmarks.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

Table = dict[str, Any]


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    return {"title": title, "columns": columns, "rows": rows}


def verdict(measured: float, allowed: float) -> str:
    """``met``, or by how much a time (or a size) is above what the goal allows."""
    if measured <= allowed:
        return f"met ({measured / allowed - 1:+.1%})"
    return f"short by {measured / allowed - 1:.1%}"


def head(record: dict[str, Any]) -> list[str]:
    machine = record["machine"]
    lines = [", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)]
    lines += [f"{name} is missing: {reason}" for name, reason in record["rivals"].items() if reason]
    return lines + record.get("notes", [])


def markdown(record: dict[str, Any]) -> str:
    parts = [f"**{record['benchmark']}**", *head(record)]
    for each in record["tables"]:
        lines = [
            "| " + " | ".join(each["columns"]) + " |",
            "|" + "---|" * len(each["columns"]),
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in each["rows"]),
        ]
        parts += [each["title"], "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _console() -> Any:
    """As wide as the terminal; where the output is none, wide enough for whatever it holds."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 230, highlight=False)


def show_head(record: dict[str, Any]) -> None:
    for line in head(record):
        _console().print(line, markup=False)


def show_table(each: Table) -> None:
    from rich.table import Table as RichTable

    drawn = RichTable(title=each["title"], title_justify="left", pad_edge=False)
    for number, column in enumerate(each["columns"]):
        drawn.add_column(column, justify="left" if not number else "right", overflow="fold")
    for row in each["rows"]:
        drawn.add_row(*(cell.replace("[", "\\[") for cell in row))
    _console().print(drawn)
    sys.stdout.flush()


def heed_termination() -> None:
    """Let a time limit end the program like an interrupt: what was found so far is still shown and written."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def save(record: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    for path in sys.argv[1:]:
        sys.stdout.write(markdown(json.loads(Path(path).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
