# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Composites as candidates: an operator put together from pieces that the same policy resolves.

What a policy says of a composite as a whole, which backward goes with it, and where it stands: at the place of its
last-placed piece, behind a real implementation of that place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from te_dispatch.core.decision import Accepted, Decision, Rejected
from te_dispatch.core.facts import CallFacts
from te_dispatch.core.manifest import CANONICAL
from te_dispatch.core.operator import OPERATORS, Decomposition, Operator
from te_dispatch.core.policy import COMPOSITE, Selector
from te_dispatch.core.policy.view import LAST, Place, PolicyView

#: `te_dispatch.core.resolve.resolve` for the device, policy and snapshot of a view.
Resolve = Callable[[Operator, CallFacts], Decision]


class Composites:
    """The decompositions of one call's operator.

    Args:
        view: the policy as that call sees it.
        resolve: decides the pieces.
    """

    def __init__(self, view: PolicyView, resolve: Resolve) -> None:
        self.view = view
        self.resolve = resolve

    def consider(self, decomposition: Decomposition, places: dict[str, Place]) -> Rejected | Accepted | None:
        """What becomes of one decomposition; None where it does not apply, and so is no candidate at all.

        Its place is put into `places` if it is accepted.
        """
        candidate = f"{COMPOSITE}.{decomposition.name}"
        pieces = self._pieces(decomposition)
        if pieces is None:
            return None
        filtered = self._filtered(decomposition, candidate, pieces)
        if filtered is not None:
            return filtered
        missing = [f"{name}: no {piece.operator} here" for name, piece in pieces.items() if piece.chosen is None]
        if missing:
            return Rejected(candidate, "; ".join(missing), "pieces")
        saved = self.view.call.get("saved") if self.view.operator.saved is not None else None
        if isinstance(saved, str) and saved != candidate:
            return Rejected(candidate, f"cannot read what {saved} saved", "companion")
        companion = self._companion(decomposition, candidate)
        if isinstance(companion, Rejected):
            return companion
        places[candidate] = place = self._place(decomposition, candidate, pieces)
        return Accepted(
            id=candidate,
            distribution="te-dispatch",
            version=str(self.view.operator.version),
            place=place.text,
            origin=place.origin,
            companion=companion,
            assumed=tuple(a for piece in pieces.values() if piece.chosen for a in piece.chosen.assumed),
            pieces=pieces,
            saved_format=candidate if self._keeps_state() else CANONICAL,
        )

    def _pieces(self, decomposition: Decomposition) -> Mapping[str, Decision] | None:
        pieces = decomposition.pieces(self.view.call)
        if pieces is None:
            return None
        return {
            name: self.resolve(OPERATORS[piece.operator], piece.facts(self.view.call)) for name, piece in pieces.items()
        }

    def _keeps_state(self) -> bool:
        """Whether the backward needs more than the operator's results: a composite's then reads its forward's only."""
        backward = self.view.operator if self.view.operator.backward else self.view.companion
        return backward is not None and backward.saved is not None

    def _filtered(
        self, decomposition: Decomposition, candidate: str, pieces: Mapping[str, Decision]
    ) -> Rejected | None:
        """What a policy has against a composite as a whole; its pieces were filtered by what speaks of them.

        A rule that speaks of none of the pieces would be got around by taking the operator apart: such a composite
        must be named by the rule, or consist of what the rule lists.
        """
        traits = frozenset(("unfused",)) if decomposition.materializes else frozenset()
        for deny in (self.view.policy.deny, *(rule.deny for rule in self.view.rules)):
            for selector in deny:
                if selector.matches(candidate, False, traits):
                    return Rejected(candidate, f"denied by {selector.text!r}", "policy", selector.origin)
        allowing = next((rule for rule in self.view.rules if rule.allow is not None), None)
        for rule in self.view.rules:
            if any(rule.speaks_of(piece.operator, OPERATORS[piece.operator].family) for piece in pieces.values()):
                continue
            groups = [("required", rule.require)] if rule.require else []
            if rule is allowing and rule.allow is not None:
                groups.append(("not among the allowed", rule.allow))
            for what, group in groups:
                if any(s.matches(candidate, False, traits) for s in group):
                    continue
                if not all(self._consists_of(piece, group) for piece in pieces.values()):
                    listed = " or ".join(s.text for s in group) or "nothing"
                    return Rejected(candidate, f"{what}: {listed}, also of its pieces", "policy", rule.origin)
        return None

    def _consists_of(self, piece: Decision, group: tuple[Selector, ...]) -> bool:
        if piece.chosen is None:
            return False
        if piece.chosen.pieces:
            return all(self._consists_of(inner, group) for inner in piece.chosen.pieces.values())
        backend, implementation = self.view.snapshot.implementation(piece.chosen.id)
        traits = self.view.of(OPERATORS[piece.operator], piece.call).traits(implementation)
        return any(s.matches(piece.chosen.id, self.view.native(backend), traits) for s in group)

    def _companion(self, decomposition: Decomposition, candidate: str) -> str | Rejected | None:
        companion = self.view.companion
        if companion is None or self.view.operator.backward or self.view.call.get("inference") is True:
            return None
        if companion.saved is None:
            chosen = self.resolve(companion, self.view.companion_facts()).chosen
            if chosen is None:
                return Rejected(candidate, f"no {companion.name} goes with it", "companion")
            return chosen.id
        backward = Composites(self.view.of_companion(), self.resolve)
        twin = next((d for d in companion.decompositions if d.name == decomposition.name), None)
        composite = None if twin is None else backward.consider(twin, {})
        if not isinstance(composite, Accepted):
            why = f" ({composite.reason})" if composite is not None else ""
            return Rejected(candidate, f"its {companion.name} cannot be composed here{why}", "companion")
        return candidate

    def _place(self, decomposition: Decomposition, candidate: str, pieces: Mapping[str, Decision]) -> Place:
        for kind, selectors in (
            ("rule", self.view.ordering.prefer if self.view.ordering else ()),
            ("policy", self.view.policy.prefer),
        ):
            for position, selector in enumerate(selectors):
                if selector.text in (candidate, COMPOSITE):
                    rule, policy = (position, LAST) if kind == "rule" else (LAST, position)
                    tier = 2 if decomposition.materializes and selector.text == COMPOSITE else 0
                    return Place(0, tier, rule, policy, 0, 0, f"{kind} prefers {selector.text}", selector.origin)
        name, worst = max(
            ((name, self._place_of_piece(piece)) for name, piece in pieces.items()), key=lambda item: item[1].key()
        )
        tier = 2 if decomposition.materializes else worst.tier
        text = f"as its last-placed piece, {name}: {worst.text}"
        if decomposition.materializes:
            text += ", after real ones because it materializes"
        return dataclasses.replace(worst, tier=tier, composite=1, text=text)

    def _place_of_piece(self, piece: Decision) -> Place:
        assert piece.chosen is not None
        inner = self.view.of(OPERATORS[piece.operator], piece.call)
        if piece.chosen.id.startswith(f"{COMPOSITE}."):
            name = piece.chosen.id.partition(".")[2]
            decomposition = next(d for d in inner.operator.decompositions if d.name == name)
            return Composites(inner, self.resolve)._place(decomposition, piece.chosen.id, piece.chosen.pieces)
        backend, implementation = self.view.snapshot.implementation(piece.chosen.id)
        return inner.place(backend, implementation, piece.chosen.companion)
