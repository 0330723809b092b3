# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What became of a unit, as plain data that survives a process, a file and a report."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.rules import Finding

#: passed, failed; not_claimed: its requirements reject the call; skipped, expected_failure: a file of the vendor's says
#: so; unexpected_pass: it says that this fails, and it passes, which is an error.
STATES = ("passed", "failed", "not_claimed", "skipped", "expected_failure", "unexpected_pass")

#: States of units that ran and of which the kit knows what is right.
JUDGED = ("passed", "failed", "expected_failure", "unexpected_pass")

#: `Outcome.cause` of units that are not claimed: the implementation declined when it was called, or cannot be bound.
DECLINED, REFUSED = "declined", "refused"


@dataclass
class Outcome:
    """The result of one unit.

    Attributes:
        unit: its id.
        state: of `STATES`.
        message: why, for anything but ``passed``; the first failure in words.
        findings: one per judged result.
        notes: what is worth reporting of a unit that passed (how far FP8 lets a later token reach, say).
        seconds: it took.
        cause: of what is not claimed: `DECLINED`, `REFUSED`, or empty where the manifest's requirements, or what the
            unit's case is made of, leave nothing to be called.
    """

    unit: str
    state: str
    message: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cause: str = ""

    @property
    def parsed(self) -> Unit:
        return Unit.parse(self.unit)

    @property
    def ratio(self) -> float:
        """The worst error over its bound among the findings, 0 where there is none."""
        return max((finding.ratio for finding in self.findings), default=0.0)

    @property
    def reproducer(self) -> str:
        """A shell line that runs this unit alone."""
        return f"te-dispatch conformance --unit {shlex.quote(self.unit)}"

    def as_data(self) -> dict[str, Any]:
        """For JSON, which has no infinity: it is written as the text ``inf``."""
        data = dataclasses.asdict(self)
        for finding in data["findings"]:
            if math.isinf(finding["ratio"]):
                finding["ratio"] = "inf"
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Outcome:
        found = dict(data)
        found["findings"] = [
            Finding(**{**f, "ratio": float(f["ratio"]), "index": tuple(f["index"]), "shape": tuple(f.get("shape", ()))})
            for f in data["findings"]
        ]
        return cls(**found)


#: Characters of a message's line, and lines: what implementations raise may hold whole tensors.
_LINE, _LINES = 600, 20


def bounded(message: str) -> str:
    """A message with long lines cut, and without those beyond a number."""
    lines = message.split("\n")
    kept = [line if len(line) <= _LINE else f"{line[: _LINE - 4]} ..." for line in lines[:_LINES]]
    return "\n".join(kept if len(lines) <= _LINES else [*kept, f"... {len(lines) - _LINES} more lines"])


def failed(outcome: Outcome) -> bool:
    """Whether it makes the whole run fail."""
    return outcome.state in ("failed", "unexpected_pass")


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many of each state, and ``claimed``: everything that ran."""
    found = Counter(outcome.state for outcome in outcomes)
    result = {state: found[state] for state in STATES}
    result["claimed"] = sum(found[s] for s in ("passed", "failed", "expected_failure", "unexpected_pass"))
    return result
