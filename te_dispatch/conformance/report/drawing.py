# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Numbers as shapes: the classes that colour a ratio, the bars of a histogram, the cells of a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from te_dispatch.conformance.report.record import Cell
from te_dispatch.conformance.rules import HISTOGRAM

#: A matrix cell's ratio up to which it has the class at the same place of `SHADES`.
STEPS = (0.0, 2.0**-8, 2.0**-4, 2.0**-2, 2.0**-1, 1.0)
SHADES = tuple(f"s{step}" for step in range(len(STEPS)))

#: One character per tile of a heat map: 0, then log2(ratio) from `LOWEST` to 20 in halves. The script reads them back.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
LOWEST = -11

#: Of a histogram's drawing, in its own units.
BAR_WIDTH, BAR_HEIGHT = 20, 80


def shade(cell: Cell) -> str:
    """The CSS class of a matrix cell."""
    if cell.state != "passed":
        return cell.state
    worst = cell.worst
    ratio = worst.ratio if worst is not None else 0.0
    return next((name for name, step in zip(SHADES, STEPS) if ratio <= step), SHADES[-1])


def short(ratio: float) -> str:
    """A ratio in a few characters, never rounded across the bound: 0.999 is within it, and 1.001 is not."""
    if math.isinf(ratio):
        return "\N{INFINITY}"
    if ratio == 0:
        return "0"
    if 0.99 < ratio < 1.1:
        return "0.99" if ratio < 1 else "1" if ratio == 1 else "1.1"
    if 1e-3 <= ratio < 1e4:
        return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
    return f"{ratio:.0e}".replace("e-0", "e-").replace("e+0", "e")


def heat(rows: Sequence[Sequence[float]]) -> str:
    """A heat map as text, its rows joined by dots, a character of `ALPHABET` per tile."""
    return ".".join("".join(map(_level, row)) for row in rows)


def _level(ratio: float) -> str:
    if ratio == 0:
        return ALPHABET[0]
    if not math.isfinite(ratio):
        return ALPHABET[-1]
    return ALPHABET[min(max(1 + round(2 * (math.log2(ratio) - LOWEST)), 1), len(ALPHABET) - 1)]


def worst_tile(rows: Sequence[Sequence[float]]) -> tuple[int, int, float]:
    """Row, column and ratio of the worst tile."""
    ratio, row, column = max((value, -r, -c) for r, line in enumerate(rows) for c, value in enumerate(line))
    return -row, -column, ratio


@dataclass(frozen=True)
class Bar:
    """One bin of a histogram.

    Attributes:
        x, y, height: in the drawing's units.
        beyond: whether its elements exceed their limits.
        label: what it counts, in words.
    """

    x: int
    y: float
    height: float
    beyond: bool
    label: str


def bars(histogram: Sequence[int]) -> list[Bar]:
    """The bins that hold something; heights are logarithmic, for exact elements outnumber all others."""
    tallest = math.log1p(max(histogram))
    found = []
    for place, count in enumerate(histogram):
        if count:
            height = round(max(3.0, BAR_HEIGHT * math.log1p(count) / tallest), 1)
            beyond = place > HISTOGRAM.index(0)
            label = f"{count:,} elements: {_range(place)}"
            found.append(Bar(place * BAR_WIDTH, round(BAR_HEIGHT - height, 1), height, beyond, label))
    return found


def sparkline(histogram: Sequence[int]) -> str:
    """The same bars as one SVG path in a box of 4 per bin by 20; empty for a histogram that counts nothing."""
    if not any(histogram):
        return ""
    tallest = math.log1p(max(histogram))
    path = [
        f"M{place * 4} 20v-{max(2, round(20 * math.log1p(count) / tallest))}h3V20z"
        for place, count in enumerate(histogram)
        if count
    ]
    return "".join(path)


def _range(place: int) -> str:
    if place == 0:
        return f"error at most 2^{HISTOGRAM[0]} of the limit"
    if place == len(HISTOGRAM):
        return f"error above 2^{HISTOGRAM[-1]} times the limit"
    return f"2^{HISTOGRAM[place - 1]} to 2^{HISTOGRAM[place]} of the limit"
