# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A vendor's files of units to leave out, and of units that are known to fail. Strict, so that they cannot rot.

One pattern a line, a glob over unit ids, then ``#`` and why; empty lines and lines that start with ``#`` are comments:

    acme.gemm/values/gemm.fp8[*epilogue=gelu*]  # the chip has no tanh; fixed in firmware 7

A pattern that matches nothing, a line without a reason, and a unit that is expected to fail and passes are errors.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.settings import UsageError


@dataclass(frozen=True)
class Line:
    """One pattern, why it is there, and where it stands."""

    pattern: str
    reason: str
    where: str

    def matches(self, unit: str) -> bool:
        return _compiled(self.pattern).fullmatch(unit) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # Ids hold brackets, which a glob would take for a set: only * and ? are special here.
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


def read(path: str | None) -> list[Line]:
    """The lines of a file; none for None.

    Raises:
        UsageError: it cannot be read, or a line has no reason; with file and line.
    """
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        # A seed follows a '#' without a space: only one that stands apart starts the reason.
        pattern, apart, reason = line.partition(" #")
        if not apart or not reason.strip():
            raise UsageError(f"{path}:{number}: {line.strip()!r} has no reason; expected: pattern  # why")
        lines.append(Line(pattern.strip(), reason.strip(), f"{path}:{number}"))
    return lines


@dataclass(frozen=True)
class Expectations:
    """What a vendor says beforehand.

    Attributes:
        skip: units that are not run.
        fail: units that fail.
    """

    skip: tuple[Line, ...] = ()
    fail: tuple[Line, ...] = ()

    @classmethod
    def load(cls, skip: str | None, fail: str | None) -> Expectations:
        """Read both files.

        Raises:
            UsageError: one of them cannot be used.
        """
        return cls(tuple(read(skip)), tuple(read(fail)))

    def check(self, units: Sequence[Unit], whole: Callable[[], Iterable[Unit]]) -> None:
        """Refuse patterns that match no unit.

        Args:
            units: of this run.
            whole: all units at level full, asked where this run's do not suffice: a smoke test is not to complain
                of a pattern for a case that it leaves out.

        Raises:
            UsageError: names every such line.
        """
        ids = [unit.id for unit in units]
        unmatched = [line for line in (*self.skip, *self.fail) if not any(map(line.matches, ids))]
        if unmatched:
            ids = [unit.id for unit in whole()]
            unmatched = [line for line in unmatched if not any(map(line.matches, ids))]
        if unmatched:
            stale = "; ".join(f"{line.where}: {line.pattern}" for line in unmatched)
            raise UsageError(f"no unit matches (a misspelt or stale pattern): {stale}")

    def skipped(self, unit: Unit) -> Outcome | None:
        """The outcome of a unit that is not to be run."""
        for line in self.skip:
            if line.matches(unit.id):
                return Outcome(unit.id, "skipped", f"{line.reason} ({line.where})")
        return None

    def judged(self, outcome: Outcome) -> Outcome:
        """An outcome in the light of what was expected."""
        if outcome.state not in ("passed", "failed"):
            return outcome
        for line in self.fail:
            if line.matches(outcome.unit):
                if outcome.state == "failed":
                    return replace(outcome, state="expected_failure", message=f"{line.reason}: {outcome.message}")
                message = f"passes, but {line.where} expects a failure ({line.reason}): take the line out"
                return replace(outcome, state="unexpected_pass", message=message)
        return outcome
