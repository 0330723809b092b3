# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The outcome of one resolution, complete enough that errors, logs and ``te-dispatch explain`` need nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from te_dispatch.core.facts import CallFacts, DeviceFacts, FactValue
from te_dispatch.core.policy import Origin


@dataclass(frozen=True)
class Accepted:
    """A candidate that serves the call.

    Attributes:
        id: ``<backend>.<name>`` or ``composite.<name>``.
        distribution, version: of the package that ships it; of this package for a composite.
        place: what put it where it is, e.g. ``policy prefers native`` or ``rank 10``.
        origin: the policy line behind `place`, if there is one.
        companion: id of the backward (or forward) it is bound with.
        assumed: conditions that an unknown fact left open.
        pieces: a composite's steps by name.
        traits, saved_format: of the implementation.
    """

    id: str
    distribution: str
    version: str
    place: str
    origin: Origin | None = None
    companion: str | None = None
    assumed: tuple[str, ...] = ()
    pieces: Mapping[str, Decision] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    saved_format: str = ""

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not, and why.

    Attributes:
        reason: one phrase.
        where: which step of the dispatch contract it failed: ``policy``, ``device``, ``call``, ``companion``,
            ``pieces``, ``backend`` (unavailable here), ``bind``, ``absence`` (a policy names it, nobody installed
            it), or in a `ModulePlan` ``decline`` (it has declined such a call in this process).
        origin: the policy line, where a policy rejected it.
    """

    id: str
    reason: str
    where: str
    origin: Origin | None = None


@dataclass(frozen=True)
class Decision:
    """Every candidate of an operator, accepted (in order) or rejected.

    Attributes:
        rule: origin of the first matching rule that set an order, if any.
        tie: names of candidates that only their names put in order.
    """

    operator: str
    operator_version: int
    call: CallFacts
    device: DeviceFacts
    policy: str
    accepted: tuple[Accepted, ...]
    rejected: tuple[Rejected, ...]
    rule: Origin | None = None
    tie: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.operator, self.accepted, self.rejected))

    @property
    def chosen(self) -> Accepted | None:
        return self.accepted[0] if self.accepted else None

    def cure_of_tie(self) -> str:
        """What decides a tie: a policy between backends, their own ranks within one."""
        backends = {name.partition(".")[0] for name in self.tie}
        return "set `rank` in its manifest" if len(backends) == 1 else "set `prefer` in a policy to choose"

    def table(self) -> str:
        """The whole decision as text: the message of `NoImplementation` and of logs."""
        facts = ", ".join(
            f"{name}={_show(value)}" for name, value in sorted(self.call.items()) if _telling(name, value)
        )
        lines = [f"{self.operator} on {self.device.label()} ({facts}) under policy {self.policy!r}:"]
        width = max([len(c) for c in [a.id for a in self.accepted] + [r.id for r in self.rejected]] or [0])
        for position, candidate in enumerate(self.accepted):
            state = "chosen " if position == 0 else "accepts"
            lines.append(f"  {candidate.id:<{width}}  {state}  {_explain(candidate)}")
            lines += [f"    {line}" for line in _tree(candidate)]
        for rejected in self.rejected:
            origin = f" ({rejected.origin})" if rejected.origin else ""
            lines.append(f"  {rejected.id:<{width}}  rejected by {rejected.where}: {rejected.reason}{origin}")
        if not self.accepted and all(rejected.where == "absence" for rejected in self.rejected):
            lines.append("  no installed backend implements it: install one, e.g. te-dispatch-torch")
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Plain data for ``--json`` and lock files."""
        return {
            "operator": f"{self.operator}@{self.operator_version}",
            "device": self.device.label(),
            "call": {name: _plain(value) for name, value in self.call.items() if not name.endswith(".default")},
            "policy": self.policy,
            "rule": str(self.rule) if self.rule else None,
            "chosen": self.chosen.id if self.chosen else None,
            "accepted": [
                {
                    "id": a.id,
                    "distribution": a.distribution,
                    "version": a.version,
                    "place": a.place,
                    "origin": str(a.origin) if a.origin else None,
                    "companion": a.companion,
                    "assumed": list(a.assumed),
                    "traits": sorted(a.traits),
                    "pieces": {name: piece.as_data() for name, piece in a.pieces.items()},
                }
                for a in self.accepted
            ],
            "rejected": [
                {"id": r.id, "reason": r.reason, "where": r.where, "origin": str(r.origin) if r.origin else None}
                for r in self.rejected
            ],
            "tie": list(self.tie),
        }


def _explain(candidate: Accepted) -> str:
    parts = [candidate.place + (f" ({candidate.origin})" if candidate.origin else "")]
    if candidate.companion:
        parts.append(f"with {candidate.companion}")
    if candidate.assumed:
        parts.append("assuming: " + "; ".join(candidate.assumed))
    return ", ".join(parts)


def _tree(candidate: Accepted) -> list[str]:
    lines = []
    for name, piece in candidate.pieces.items():
        chosen = piece.chosen
        lines.append(f"{name}: {piece.operator} -> {chosen.id if chosen else 'nothing'}")
        if chosen is not None:
            lines += [f"  {line}" for line in _tree(chosen)]
    return lines


def _telling(name: str, value: FactValue) -> bool:
    return value is not None and value is not False and value != "none" and not name.endswith(".default")


def _show(value: FactValue) -> str:
    return str(value)


def _plain(value: FactValue) -> Any:
    return list(value) if isinstance(value, tuple) else value if _is_json(value) else str(value)


def _is_json(value: FactValue) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
