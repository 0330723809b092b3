#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The table of `docs/cuda_backend.md`: what each implementation needs and promises, and what has none.

python tools/manifest_table.py            print it
python tools/manifest_table.py --write    put it into the page
"""

from __future__ import annotations

import sys
from pathlib import Path

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.manifest import CLAIMS, Implementation
from te_dispatch.core.operator import OPERATORS
from te_dispatch_cuda import MANIFEST
from te_dispatch_cuda.implementations.native import NVIDIA

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cuda_backend.md"
BEGIN, END = "<!-- manifest -->\n", "<!-- end -->\n"


def table() -> str:
    """Markdown: implementations in the manifest's order, then operators without one."""
    rows = ["| operator | implementation | needs | does not promise |", "|---|---|---|---|"]
    forwards = {entry.name: _needs(entry) for entry in MANIFEST.implementations}
    for entry in MANIFEST.implementations:
        needs, forward = _needs(entry), forwards.get(entry.name.removesuffix("_bwd"), [])
        if entry.name.endswith("_bwd") and len(forward) > 3:
            shared = f"what `cuda.{entry.name.removesuffix('_bwd')}` asks of their common arguments"
            needs = [shared, *(need for need in needs if need not in forward)]
        lacking = [claim for claim in CLAIMS if claim not in entry.claims]
        rows.append(
            f"| {entry.operator} | `cuda.{entry.name}` | {'; '.join(needs) or '-'} | {', '.join(lacking) or '-'} |"
        )
    served = {entry.operator for entry in MANIFEST.implementations}
    missing = sorted(set(OPERATORS) - served)
    if missing:
        rows += ["", f"Without an implementation here: {', '.join(missing)}."]
    return "\n".join(rows) + "\n"


def _needs(entry: Implementation) -> list[str]:
    """Beside what every entry of this backend needs."""
    return [condition.describe().replace("|", "\\|") for condition in entry.requires if condition not in NVIDIA]


def replaced(page: str) -> str:
    """The page with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def main() -> None:
    if "--write" in sys.argv[1:]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
