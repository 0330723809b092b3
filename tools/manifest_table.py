#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The table of a backend's page, `docs/<backend>_backend.md`: what each implementation needs and promises, and what has
none.

python tools/manifest_table.py cuda            print it
python tools/manifest_table.py cuda --write    put it into the page
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.manifest import CLAIMS, Implementation, Manifest
from te_dispatch.core.operator import OPERATORS

BEGIN, END = "<!-- manifest -->\n", "<!-- end -->\n"


def page_of(backend: str) -> Path:
    return Path(__file__).resolve().parents[1] / "docs" / f"{backend}_backend.md"


def table(backend: str) -> str:
    """Markdown: implementations in the manifest's order, then operators without one."""
    manifest: Manifest = importlib.import_module(f"te_dispatch_{backend}").MANIFEST
    rows = ["| operator | implementation | needs | does not promise |", "|---|---|---|---|"]
    needed = {entry.name: _needs(entry, manifest) for entry in manifest.implementations}
    for entry in manifest.implementations:
        needs, forward = needed[entry.name], needed.get(entry.name.removesuffix("_bwd"), [])
        if entry.name.endswith("_bwd") and len(forward) > 3:
            shared = f"what `{backend}.{entry.name.removesuffix('_bwd')}` asks of their common arguments"
            needs = [shared, *(need for need in needs if need not in forward)]
        lacking = ", ".join(claim for claim in CLAIMS if claim not in entry.claims)
        rows.append(f"| {entry.operator} | `{backend}.{entry.name}` | {'; '.join(needs) or '-'} | {lacking or '-'} |")
    missing = sorted(set(OPERATORS) - {entry.operator for entry in manifest.implementations})
    if missing:
        rows += ["", f"Without an implementation here: {', '.join(missing)}."]
    return "\n".join(rows) + "\n"


def _needs(entry: Implementation, manifest: Manifest) -> list[str]:
    """Beside what every entry of the backend needs."""
    return [
        condition.describe().replace("|", "\\|")
        for condition in entry.requires
        if not all(condition in other.requires for other in manifest.implementations)
    ]


def replaced(backend: str, page: str) -> str:
    """The page with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}{table(backend)}{END}{rest.partition(END)[2]}"


def main() -> None:
    backend, *options = sys.argv[1:] or sys.exit(__doc__)
    page = page_of(backend)
    if "--write" in options:
        page.write_text(replaced(backend, page.read_text()))
    else:
        print(table(backend), end="")


if __name__ == "__main__":
    main()
