# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a process warns of when it decides: slow paths, orders that only names decided, and what NVTE_DEBUG asks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from te_dispatch.core.decision import Decision
from te_dispatch.core.operator import OPERATORS

if TYPE_CHECKING:
    from te_dispatch.core.environment import Debug

_log = logging.getLogger("te_dispatch")


class Announcements:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[tuple[str, ...]] = set()

    def announce(self, decision: Decision, debug: Debug | None) -> None:
        """Warn of a slow path and of a tie; with `debug` enabled, say which attention was chosen."""
        chosen = decision.chosen
        assert chosen is not None
        where = decision.device.label()
        # An oracle that nobody named is rejected by no line of a policy.
        asked_for = any(rejected.where == "policy" and rejected.origin is not None for rejected in decision.rejected)
        if "emulated" in chosen.traits and not asked_for and self._once("emulated", chosen.id, where):
            _log.warning(
                "%s runs emulated on %s (%s): no installed backend has a real implementation for this call; "
                "te-dispatch explain %s shows why",
                decision.operator, where, chosen.id, decision.operator,
            )  # fmt: skip
        asked = debug is not None and debug.enabled and OPERATORS[decision.operator].family == "attention"
        if asked and self._once("debug", decision.operator, chosen.id, where):
            level = 0 if debug is None else debug.level
            _log.warning("%s", decision.table() if level >= 2 else f"{decision.operator}: {chosen.id}")
        if decision.tie and self._once("tie", *decision.tie, where):
            _log.warning(
                "%s on %s: %s are equally placed and %s was taken by name; %s",
                decision.operator, where, " and ".join(decision.tie), chosen.id, decision.cure_of_tie(),
            )  # fmt: skip

    def _once(self, *what: str) -> bool:
        if what in self._said:
            return False
        self._said.add(what)
        return True
