# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a module's step would call, and what would serve each call: the result of `te_dispatch.pytorch.plan`.

A lock file (`te_dispatch.core.plan`) tells what a process has resolved, under the facts that its tables are keyed by. A
module's plan tells the calls of one step, in order, each with all of its facts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from te_dispatch.core.decision import Accepted, Decision
from te_dispatch.core.facts import CallFacts, DeviceFacts, FactValue

FORWARD, BACKWARD = "forward", "backward"

#: How the table names a call site that has no name: the module itself.
_ROOT = "."


@dataclass(frozen=True)
class PlannedCall:
    """One call of an operator.

    Attributes:
        phase: ``forward`` or ``backward``. A checkpoint's recomputation is part of the backward.
        site: the qualified name of the module whose step makes the call, as in ``named_modules()``: empty for the
            planned module itself, and for the update of delayed scales, one call of which serves all modules.
        decision: its facts, what serves it, and why the others do not.
    """

    phase: str
    site: str
    decision: Decision

    @property
    def operator(self) -> str:
        return self.decision.operator

    @property
    def facts(self) -> CallFacts:
        return self.decision.call

    @property
    def device(self) -> DeviceFacts:
        return self.decision.device

    @property
    def chosen(self) -> Accepted | None:
        """The implementation, None where nothing serves the call."""
        return self.decision.chosen

    @property
    def choice(self) -> str:
        """The implementation's id, with a composite's pieces; ``nothing`` where nothing serves the call."""
        return _written(self.chosen)

    def to_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, "site": self.site, **self.decision.as_data()}

    def __str__(self) -> str:
        return f"{self.phase} {self.site or _ROOT} {self.operator} -> {self.choice}"


@dataclass(frozen=True)
class Difference:
    """A call in which two plans differ.

    Attributes:
        mine, other: the call in the plan that was asked and in the one it was compared with; None where it has none.
        facts: names of the facts that differ.
    """

    mine: PlannedCall | None
    other: PlannedCall | None
    facts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.mine is None or self.other is None:
            return f"{self.other or self.mine}: only in {'the other plan' if self.mine is None else 'this plan'}"
        where = f"{self.mine.phase} {self.mine.site or _ROOT} {self.mine.operator}"
        said = []
        if self.mine.choice != self.other.choice:
            said.append(f"{self.mine.choice} here, {self.other.choice} in the other plan")
        for name in self.facts:
            said.append(f"{name} is {_fact(self.mine, name)} here, {_fact(self.other, name)} in the other plan")
        return f"{where}: {'; '.join(said)}"


@dataclass(frozen=True)
class ModulePlan:
    """Every call of a module's forward and backward, in order. Iterating it gives the calls.

    Attributes:
        module: its class.
        device: for which it was planned.
        recipe: in words, None for high precision.
        calls: in the order in which they are made.
        assumed: what could not be found out about a device that is not here, in words.
    """

    module: str
    device: DeviceFacts
    recipe: str | None
    calls: tuple[PlannedCall, ...]
    assumed: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlannedCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> PlannedCall:
        return self.calls[index]

    @property
    def forward(self) -> tuple[PlannedCall, ...]:
        return tuple(call for call in self.calls if call.phase == FORWARD)

    @property
    def backward(self) -> tuple[PlannedCall, ...]:
        return tuple(call for call in self.calls if call.phase == BACKWARD)

    @property
    def unserved(self) -> tuple[PlannedCall, ...]:
        """The calls that nothing serves: the step would raise `NoImplementation` at the first of them."""
        return tuple(call for call in self.calls if call.chosen is None)

    def differences(self, other: ModulePlan) -> tuple[Difference, ...]:
        """The calls that only one of two plans has, or that have other facts or another implementation in the other.

        Calls are matched by phase, call site and operator, in order. What serves a call is compared by its id, so that
        plans for two devices differ where the devices' choices do; packages' versions are not compared.
        """
        mine, theirs = [_place(call) for call in self.calls], [_place(call) for call in other.calls]
        found: list[Difference] = []
        for tag, i, j, m, n in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
            if tag != "equal":
                found += [Difference(call, None) for call in self.calls[i:j]]
                found += [Difference(None, call) for call in other.calls[m:n]]
                continue
            for one, two in zip(self.calls[i:j], other.calls[m:n]):
                facts = _differing(one.facts, two.facts)
                if facts or one.choice != two.choice:
                    found.append(Difference(one, two, facts))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it. Each call is what `Decision.as_data` gives, with its phase and call site."""
        return {
            "module": self.module,
            "device": self.device.label(),
            "recipe": self.recipe,
            "calls": [call.to_dict() for call in self.calls],
            "assumed": list(self.assumed),
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table's rows: phase, call site, operator, implementation, and the facts that tell calls apart."""
        return [(call.phase, call.site or _ROOT, call.operator, call.choice, brief(call.facts)) for call in self.calls]

    def heading(self) -> str:
        """What was planned, in one line."""
        described = " (described)" if self.device.described else ""
        return f"{self.module} on {self.device.label()}{described}, {self.recipe or 'high precision'}"

    def __str__(self) -> str:
        rows = [("phase", "call site", "operator", "implementation", "facts"), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [self.heading()]
        for row in rows:
            lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip())
        lines += [f"assumed: {assumption}" for assumption in self.assumed]
        return "\n".join(lines)


def brief(facts: CallFacts) -> str:
    """Sizes, dtypes and words of a call, without what says nothing about it."""
    telling = {
        name: value
        for name, value in facts.items()
        if not isinstance(value, bool) and _tells(value) and not name.endswith(".default")
    }
    return ", ".join(f"{name}={value}" for name, value in telling.items())


def _tells(value: FactValue) -> bool:
    return isinstance(value, (str, int)) and value not in ("none", "unknown")


def _written(accepted: Accepted | None) -> str:
    if accepted is None:
        return "nothing"
    pieces = [f"{name}={_written(piece.chosen)}" for name, piece in accepted.pieces.items()]
    return f"{accepted.id}({', '.join(pieces)})" if pieces else accepted.id


def _place(call: PlannedCall) -> tuple[str, str, str]:
    return call.phase, call.site, call.operator


def _fact(call: PlannedCall, name: str) -> FactValue | str:
    return call.facts.get(name, "unknown")


def _differing(one: CallFacts, two: CallFacts) -> tuple[str, ...]:
    names: Sequence[str] = list(dict.fromkeys((*one, *two)))
    return tuple(name for name in names if one.get(name, ...) != two.get(name, ...))
