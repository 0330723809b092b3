# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_dispatch_faulty.levels import AT_SMOKE

if TYPE_CHECKING:
    from te_dispatch_faulty.binding import Call


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
        shows: a part of the ids of the units that it is likely to show in, which are run first.
        also: another implementation that is spoiled in the same way: the forward's backward, say.
    """

    name: str
    operator: str
    implementation: str
    wrong: str
    behave: Callable[[Call], Any]
    isolated: bool = False
    shows: str = ""
    also: str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        """Of the kit, at which it must be caught."""
        return ("full", "smoke") if self.name in AT_SMOKE else ("full",)
