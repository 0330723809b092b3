# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a fault is, and what is known of where the kit catches each.

``known.json`` holds what `te_dispatch_faulty.score` found with ``--remember``: the faults that level ``smoke`` catches,
and for those that take many units the one that caught them, to be run first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_dispatch_faulty.binding import Call

KNOWN_FILE = Path(__file__).parent / "known.json"
_known = json.loads(KNOWN_FILE.read_text())
#: Names of the faults that level ``smoke`` must catch; level ``full`` must catch all.
AT_SMOKE: frozenset[str] = frozenset(_known["smoke"])
#: Level -> fault -> the id of a unit that caught it.
LIKELY: Mapping[str, Mapping[str, str]] = _known["likely"]


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: of it.
        operator: that is spoiled.
        implementation: the id of the one that is spoiled.
        wrong: what is wrong, after "it".
        behave: what the spoiled implementation does with a call.
        isolated: it ends or blocks the process that it runs in.
        also: another implementation that is spoiled in the same way: the forward's backward, say.
    """

    name: str
    operator: str
    implementation: str
    wrong: str
    behave: Callable[[Call], Any]
    isolated: bool = False
    also: str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        """Of the kit, at which it must be caught."""
        return ("full", "smoke") if self.name in AT_SMOKE else ("full",)
