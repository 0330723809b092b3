# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The matrix as text: kernels down, chips across."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from te_dispatch_triton.crosscompile.run import Row

#: What of an instruction's name says nothing about its operands.
_NOISE = re.compile(r"v_(s?mfma|wmma)(_scale)?_\w+?_(?=\d+x)|_f32$|(?<=\.)f32$")


def printed(rows: Iterable[Row], chips: Sequence[str]) -> str:
    """In a cell: registers / spills / KiB of shared memory, each the largest of the kernel's forms, then what kinds of
    matrix instructions were seen. ``FAILED`` where a form has a problem."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault((row.family, row.kernel), {}).setdefault(row.chip, []).append(row)
    lines = [["kernel", "forms", *chips]]
    family = None
    for (of, kernel), cells in found.items():
        if of != family:
            family = of
            lines.append([f"-- {of}", "", *("" for _ in chips)])
        forms = max(len(x) for x in cells.values())
        lines.append([kernel, str(forms), *(_cell(cells.get(chip, [])) for chip in chips)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    told = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join(
        [*told, "", "registers / spills / KiB of shared memory, largest of the forms; operands of matrix units"]
    )


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    facts = [row.facts for row in rows if row.facts is not None]
    mark = "FAILED " if any(row.problem for row in rows) else ""
    if not facts:
        return mark.strip()
    kinds = sorted({kind_of(one) for fact in facts for one in fact.instructions})
    shared = max(fact.shared for fact in facts) / 1024
    numbers = f"{max(f.registers for f in facts)}/{max(f.spills for f in facts)}/{shared:.4g}"
    return f"{mark}{numbers} {' '.join(kinds)}".rstrip()


def kind_of(instruction: str) -> str:
    """A matrix instruction in short: its unit and its operands' types, without the tile's size."""
    if instruction.startswith("v_"):
        unit = "wmma" if "wmma" in instruction else "mfma"
        return f"{unit}:{instruction.rsplit('x', 1)[-1].lstrip('0123456789_').removesuffix('_1k')}"
    unit, _, types = instruction.partition(" ")
    operands = [part for part in types.split(".") if part != "f32"]
    return f"{unit}:{'x'.join(dict.fromkeys(operands))}"
