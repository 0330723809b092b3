# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Resolution that asks for a call's facts one at a time.

While a graph is traced, a fact is known only to the tracer: reading one makes a guard, and resolution itself cannot be
traced. So resolution runs outside and stops at the first fact it lacks; the traced program reads that fact and asks
again. The guards are then those of exactly the facts that were read, sizes by their condition alone, and a compiled
graph depends on no table that other calls fill.
"""

from __future__ import annotations

from te_dispatch.core.decision import Decision
from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue, Recording
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import Compare, MultipleOf
from te_dispatch.core.resolve import resolve
from te_dispatch.core.snapshot import Snapshot
from te_dispatch.core.tables import Atom

#: What a traced program has read so far: raw values of facts, and truths of conditions on sizes.
Answers = dict[Atom, object]


class Lacking(BaseException):
    """Resolution needs `atom`, a fact of the call or a condition on it.

    No failure, so no `Exception`: what contains the failures of a plugin's requirements lets it through.
    """

    def __init__(self, atom: Atom) -> None:
        super().__init__(atom)
        self.atom = atom


class _Asked(Recording):
    """Facts of a call that raise `Lacking` where they are not known yet."""

    def __init__(self, operator: Operator, answers: Answers) -> None:
        super().__init__({})
        self._operator = operator
        self._answers = answers

    def read(self, name: str, condition: object) -> FactValue:
        fact = self._operator.facts.get(name)
        if fact is None:
            return UNKNOWN
        if (name, None) in self._answers:
            return fact.canonical(self._answers[name, None])
        numeric = isinstance(condition, MultipleOf) or (
            isinstance(condition, Compare) and not isinstance(condition.bound, str)
        )
        atom: Atom = (name, condition if numeric and fact.kind == "size" else None)
        if atom not in self._answers:
            raise Lacking(atom)
        return _representative(atom[1], bool(self._answers[atom]))

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (name for name, condition in self._answers if condition is None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _representative(condition: object, holds: bool) -> int | float:
    """A size for which `condition` is as true as it is for the one that the traced program read."""
    if isinstance(condition, MultipleOf):
        return condition.factor if holds else condition.factor + 1
    assert isinstance(condition, Compare) and not isinstance(condition.bound, str)
    bound = condition.bound
    for candidate in (bound, bound + 1, bound - 1):
        if condition._holds(candidate) == holds:
            return candidate
    raise AssertionError(f"no number makes {condition.describe()} {holds}")


def decide(operator: Operator, answers: Answers, device: DeviceFacts, policy: Policy, snapshot: Snapshot) -> Decision:
    """`resolve` with the facts read so far.

    Raises:
        Lacking: a further fact decides; read it and call again.
    """
    return resolve(operator, _Asked(operator, answers), device, policy, snapshot)
