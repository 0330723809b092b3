# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The dispatch contract, steps 1 to 4, as one pure function.

1. Facts: the operator, the device's facts and the call's are arguments; nothing is looked up. A fact can be unknown.
2. Filters: a policy's allow, deny and require apply to every backend alike; ``allow: []`` means none. The policy
   ``numerics.deterministic`` filters by claim.
3. Requirements: the device's first, then the call's. Every failure is recorded with its reason.
4. Order: the first matching rule's prefer, then the policy's, then rank, then name (with a warning). Emulated
   implementations and decompositions that materialize come after every real implementation, unless a preference
   names them by id. A composite stands at the place of its last-placed piece, behind a real implementation of it.

Companions resolve as one unit: a forward is accepted only with a backward that reads what it saves, or when it
declares itself for inference and the call needs no gradient. A preference that names one of the two places both, and
a rule that speaks of one speaks of both.

Steps 5 to 7 (bind, decline, no implementation) are `te_dispatch.core.manager`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from te_dispatch.core.decision import Accepted, Decision, Rejected
from te_dispatch.core.facts import CallFacts, DeviceFacts, Recording
from te_dispatch.core.manifest import CANONICAL, Implementation
from te_dispatch.core.operator import OPERATORS, Decomposition, Operator
from te_dispatch.core.policy import COMPOSITE, Policy, Selector
from te_dispatch.core.policy_view import LAST, Place, PolicyView, candidate_id
from te_dispatch.core.requirements import DEVICE_PREFIX, Compare, Condition, OneOf
from te_dispatch.core.snapshot import InstalledBackend, Snapshot


def resolve(operator: Operator, call: CallFacts, device: DeviceFacts, policy: Policy, snapshot: Snapshot) -> Decision:
    """Decide which implementations serve a call, and in which order. Pure: same arguments, same decision.

    Args:
        operator: what is called.
        call: its facts; names that are absent are unknown, and conditions on them are assumed to hold.
        device: of the operands.
        policy: effective (merged).
        snapshot: what is installed.
    """
    return _Resolution(operator, call, device, policy, snapshot).run()[0]


def resolve_recorded(
    operator: Operator, call: CallFacts, device: DeviceFacts, policy: Policy, snapshot: Snapshot
) -> tuple[Decision, frozenset[tuple[str, object]]]:
    """`resolve`, with the facts on which its winner depends: (name, condition or None for the value itself).

    Any call that agrees on them has the same winner. Those read for candidates placed after the winner are left out:
    they cannot change it.
    """
    recording = Recording(call)
    resolution = _Resolution(operator, recording, device, policy, snapshot)
    decision, places = resolution.run()
    reads: set[tuple[str, object]] = set()
    winner = places[decision.accepted[0].id].key() if decision.accepted else None
    earliest = resolution.earliest()
    for section, facts in recording.reads.items():
        # Not where a candidate stands for this call, but where it could stand for another.
        place = earliest.get(section)
        if winner is None or place is None or place.key() <= winner:
            reads |= facts
    return dataclasses.replace(decision, call=dict(call)), _keyable(operator, reads)


def _keyable(operator: Operator, reads: set[tuple[str, object]]) -> frozenset[tuple[str, object]]:
    """Conditions stay for sizes compared with numbers alone: only there is `expression` what `check` computes.

    An option may be None, which compares with nothing, and versions are text. A fact that is kept by value needs no
    condition beside it.
    """
    by_value: set[str] = set()
    for name, condition in reads:
        fact = operator.facts.get(name)
        sized = fact is not None and fact.kind == "size"
        if not sized or condition is None or (isinstance(condition, Compare) and isinstance(condition.bound, str)):
            by_value.add(name)
    kept: set[tuple[str, object]] = {(name, condition) for name, condition in reads if name not in by_value}
    return frozenset(kept | {(name, None) for name in by_value})


class _Resolution(PolicyView):
    def run(self) -> tuple[Decision, dict[str, Place]]:
        """The decision, and every placed candidate's place."""
        accepted: list[Accepted] = []
        rejected: list[Rejected] = []
        places: dict[str, Place] = {}
        for backend, implementation in self.snapshot.candidates(self.operator.name):
            candidate = candidate_id(backend, implementation)
            with self._section(candidate):
                outcome = self._consider(backend, implementation)
            partner = outcome.companion if isinstance(outcome, Accepted) else None
            places[candidate] = self.place(backend, implementation, partner)
            if isinstance(outcome, Accepted):
                place = places[candidate]
                accepted.append(dataclasses.replace(outcome, place=place.text, origin=place.origin))
            else:
                rejected.append(outcome)
        for decomposition in self.operator.decompositions:
            with self._section(f"{COMPOSITE}.{decomposition.name}"):
                composite = self._consider_composite(decomposition, places)
            if isinstance(composite, Accepted):
                accepted.append(composite)
            elif composite is not None:
                rejected.append(composite)
        rejected += self.absent()
        accepted.sort(key=lambda item: (places[item.id].key(), item.id))
        rejected.sort(key=lambda item: item.id)
        best = places[accepted[0].id].key() if accepted else None
        first = tuple(item.id for item in accepted if places[item.id].key() == best)
        decision = Decision(
            operator=self.operator.name,
            operator_version=self.operator.version,
            call=self.call,
            device=self.device,
            policy=self.policy.name,
            accepted=tuple(accepted),
            rejected=tuple(rejected),
            rule=self.ordering.origin if self.ordering else None,
            tie=first if len(first) > 1 else (),
        )
        return decision, places

    def earliest(self) -> dict[str, Place]:
        """Where each candidate could stand at best, whatever the call; where nothing can be said it is left out.

        A preference may name a companion that this call's facts kept a candidate from. A composite's pieces may be
        other ones; it stands at its last-placed piece or later, and where one piece is the operator itself, as in a
        fused operator taken apart, that is no earlier than the operator's best-placed implementation, as long as the
        same rules match the piece.
        """
        prefer = (*(self.ordering.prefer if self.ordering else ()), *self.policy.prefer)
        named = {selector.text for selector in prefer}
        partners: set[str] = set()
        if self.companion is not None:
            partners = {candidate_id(b, i) for b, i in self.snapshot.candidates(self.companion.name)} & named
        found = {
            candidate_id(backend, implementation): min(
                (self.place(backend, implementation, partner) for partner in (None, *partners)), key=Place.key
            )
            for backend, implementation in self.snapshot.candidates(self.operator.name)
        }
        best = min(found.values(), key=Place.key, default=None)
        steady = not any(rule.prefer and rule.when for rule in self.policy.rules)
        for decomposition in self.operator.decompositions:
            candidate = f"{COMPOSITE}.{decomposition.name}"
            if {candidate, COMPOSITE} & named:
                continue
            if decomposition.materializes:
                found[candidate] = Place(2, 0, 0, 0, -LAST)
            elif decomposition.simplifies and best is not None and steady:
                found[candidate] = dataclasses.replace(best, composite=1, rank=-LAST)
        return found

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        """Note what is read under a candidate's name. Inside a piece everything belongs to the composite."""
        if not isinstance(self.call, Recording):
            yield
            return
        previous, self.call.section = self.call.section, name
        try:
            yield
        finally:
            self.call.section = previous

    # -- one implementation ---------------------------------------------------------------------------------------

    def _consider(self, backend: InstalledBackend, implementation: Implementation) -> Rejected | Accepted:
        candidate = candidate_id(backend, implementation)
        filtered = self.filtered(backend, implementation)
        if filtered is not None:
            return Rejected(candidate, filtered[0], "policy", filtered[1])
        failed, assumed = self._requirements(backend, implementation)
        if failed is not None:
            return Rejected(candidate, failed[1], failed[0])
        partner: str | None = None
        if self.companion is not None:
            of = self._forward_of if self.operator.backward else self._backward_of
            found = of(backend, implementation)
            if isinstance(found, Rejected):
                return found
            partner = found
        return Accepted(
            id=candidate,
            distribution=backend.distribution,
            version=backend.version,
            place="",
            companion=partner,
            assumed=tuple(assumed),
            traits=implementation.traits,
            saved_format=implementation.saved_format,
        )

    def _requirements(
        self, backend: InstalledBackend, implementation: Implementation
    ) -> tuple[tuple[str, str] | None, list[str]]:
        """((where, reason) of the first step that fails, or None; what unknown facts left open)."""
        candidate = candidate_id(backend, implementation)
        if candidate in self.snapshot.unusable:
            return ("bind", self.snapshot.unusable[candidate]), []
        assumed: list[str] = []
        if backend.name in self.snapshot.unavailable:
            if not self.device.described:
                return ("backend", self.snapshot.unavailable[backend.name]), []
            assumed.append(f"backend {backend.name} works there, as it does not here")
        on_device = [c for c in implementation.requires if _device_only(c)]
        on_call = [c for c in implementation.requires if not _device_only(c)]
        # An implementation that lacks a newer keyword serves the calls that leave it at its default.
        on_call += [OneOf(f"{name}.default", True) for name in self.snapshot.lacking.get(candidate, ())]
        for where, conditions in (("device", on_device), ("call", on_call)):
            reasons = []
            for condition in conditions:
                verdict = condition.check(self.call, self.device)
                if verdict.holds is False:
                    reasons.append(verdict.reason)
                elif verdict.holds is None:
                    assumed.append(verdict.reason)
            if reasons:
                return (where, "; ".join(reasons)), assumed
        return None, assumed

    # -- companions -----------------------------------------------------------------------------------------------

    def _companion_resolution(self) -> _Resolution:
        assert self.companion is not None
        call = self.operator.companion_facts(self.call) if self.operator.companion_facts else {}
        return _Resolution(self.companion, call, self.device, self.policy, self.snapshot)

    def _backward_of(self, backend: InstalledBackend, forward: Implementation) -> str | Rejected | None:
        """The backward a forward is bound with: one that reads what it saves, of its own backend if possible."""
        candidate = candidate_id(backend, forward)
        if self.call.get("inference") is True:
            return None
        if forward.inference:
            return Rejected(candidate, "serves inference only, and this call may need a gradient", "companion")
        backward = self._companion_resolution()
        readers: list[tuple[tuple[float | str, ...], str]] = []
        reasons: list[str] = []
        for other, implementation in self.snapshot.candidates(backward.operator.name):
            if implementation.saved_format != forward.saved_format:
                continue
            reader = candidate_id(other, implementation)
            filtered = backward.filtered(other, implementation)
            failed, _ = backward._requirements(other, implementation)
            if filtered is not None:
                reasons.append(f"{reader}: {filtered[0]}")
            elif failed is not None:
                reasons.append(f"{reader}: {failed[1]}")
            else:
                place = backward.place(other, implementation, candidate)
                readers.append(((float(other.name != backend.name), *place.key(), reader), reader))
        if readers:
            return min(readers)[1]
        # A composite reads the operator's own results; where those do not suffice, only its own forward's.
        if forward.saved_format == CANONICAL and backward.operator.saved is None:
            for decomposition in backward.operator.decompositions:
                composite = backward._consider_composite(decomposition, {})
                if isinstance(composite, Accepted):
                    return composite.id
                if composite is not None:
                    reasons.append(f"{composite.id}: {composite.reason}")
        why = "; ".join(sorted(reasons)) or f"none reads the saved format {forward.saved_format!r}"
        return Rejected(candidate, f"no {backward.operator.name} goes with it ({why})", "companion")

    def _forward_of(self, backend: InstalledBackend, backward: Implementation) -> str | Rejected | None:
        """The forward a backward belongs to: the one that saved, where the call says which; else any that could."""
        assert self.companion is not None
        candidate = candidate_id(backend, backward)
        if self.operator.saved is not None:
            saved = self.call.get("saved")
            if isinstance(saved, str):
                saved_format = self._saved_format(saved)
                if saved_format != backward.saved_format:
                    reason = f"reads {backward.saved_format!r}, but {saved} saved {saved_format!r}"
                    return Rejected(candidate, reason, "companion")
                return saved
        forwards = [
            (other.name, candidate_id(other, forward))
            for other, forward in self.snapshot.candidates(self.companion.name)
            if forward.saved_format == backward.saved_format and not forward.inference
        ]
        if not forwards and backward.saved_format != CANONICAL:
            return Rejected(candidate, f"nothing saves the format {backward.saved_format!r}", "companion")
        # As `_backward_of` pairs them: within a backend, and across only for forwards without a reader of their own.
        served = [name for owner, name in forwards if owner == backend.name]
        if not served:
            readers = self.snapshot.candidates(self.operator.name)
            at_home = {other.name for other, b in readers if b.saved_format == backward.saved_format}
            served = [name for owner, name in forwards if owner not in at_home]
        prefer = (*(self.ordering.prefer if self.ordering else ()), *self.policy.prefer)
        named = next((selector.text for selector in prefer if selector.text in served), None)
        return named or min(served, default=None)

    def _saved_format(self, forward: str) -> str:
        if forward.startswith(f"{COMPOSITE}."):
            return forward
        try:
            return self.snapshot.implementation(forward)[1].saved_format
        except KeyError:
            return f"(unknown: {forward} is not installed)"

    # -- composites -----------------------------------------------------------------------------------------------

    def _pieces(self, decomposition: Decomposition) -> Mapping[str, Decision] | None:
        pieces = decomposition.pieces(self.call)
        if pieces is None:
            return None
        return {
            name: resolve(OPERATORS[piece.operator], piece.facts(self.call), self.device, self.policy, self.snapshot)
            for name, piece in pieces.items()
        }

    def _consider_composite(self, decomposition: Decomposition, places: dict[str, Place]) -> Rejected | Accepted | None:
        candidate = f"{COMPOSITE}.{decomposition.name}"
        pieces = self._pieces(decomposition)
        if pieces is None:
            return None  # does not apply: not a candidate at all
        filtered = self._composite_filtered(decomposition, candidate, pieces)
        if filtered is not None:
            return filtered
        missing = [f"{name}: no {piece.operator} here" for name, piece in pieces.items() if piece.chosen is None]
        if missing:
            return Rejected(candidate, "; ".join(missing), "pieces")
        saved = self.call.get("saved") if self.operator.saved is not None else None
        if isinstance(saved, str) and saved != candidate:
            return Rejected(candidate, f"cannot read what {saved} saved", "companion")
        companion = self._composite_companion(decomposition, candidate)
        if isinstance(companion, Rejected):
            return companion
        places[candidate] = place = self._composite_place(decomposition, candidate, pieces)
        return Accepted(
            id=candidate,
            distribution="te-dispatch",
            version=str(self.operator.version),
            place=place.text,
            origin=place.origin,
            companion=companion,
            assumed=tuple(a for piece in pieces.values() if piece.chosen for a in piece.chosen.assumed),
            pieces=pieces,
            saved_format=candidate if self._keeps_state() else CANONICAL,
        )

    def _keeps_state(self) -> bool:
        """Whether the backward needs more than the operator's results: a composite's then reads its forward's only."""
        backward = self.operator if self.operator.backward else self.companion
        return backward is not None and backward.saved is not None

    def _composite_filtered(
        self, decomposition: Decomposition, candidate: str, pieces: Mapping[str, Decision]
    ) -> Rejected | None:
        """What a policy has against a composite as a whole; its pieces were filtered by what speaks of them.

        A rule that speaks of none of the pieces would be got around by taking the operator apart: such a composite
        must be named by the rule, or consist of what the rule lists.
        """
        traits = frozenset(("unfused",)) if decomposition.materializes else frozenset()
        for deny in (self.policy.deny, *(rule.deny for rule in self.rules)):
            for selector in deny:
                if selector.matches(candidate, False, traits):
                    return Rejected(candidate, f"denied by {selector.text!r}", "policy", selector.origin)
        allowing = next((rule for rule in self.rules if rule.allow is not None), None)
        for rule in self.rules:
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
        backend, implementation = self.snapshot.implementation(piece.chosen.id)
        return any(s.matches(piece.chosen.id, self.native(backend), implementation.traits) for s in group)

    def _composite_companion(self, decomposition: Decomposition, candidate: str) -> str | Rejected | None:
        if self.companion is None or self.operator.backward or self.call.get("inference") is True:
            return None
        backward = self._companion_resolution()
        if self.companion.saved is not None:
            twin = next((d for d in self.companion.decompositions if d.name == decomposition.name), None)
            composite = None if twin is None else backward._consider_composite(twin, {})
            if not isinstance(composite, Accepted):
                why = f" ({composite.reason})" if composite is not None else ""
                return Rejected(candidate, f"its {self.companion.name} cannot be composed here{why}", "companion")
            return candidate
        chosen = backward.run()[0].chosen
        if chosen is None:
            return Rejected(candidate, f"no {self.companion.name} goes with it", "companion")
        return chosen.id

    def _composite_place(self, decomposition: Decomposition, candidate: str, pieces: Mapping[str, Decision]) -> Place:
        for kind, selectors in (
            ("rule", self.ordering.prefer if self.ordering else ()),
            ("policy", self.policy.prefer),
        ):
            for position, selector in enumerate(selectors):
                if selector.text in (candidate, COMPOSITE):
                    rule, policy = (position, LAST) if kind == "rule" else (LAST, position)
                    tier = 2 if decomposition.materializes and selector.text == COMPOSITE else 0
                    return Place(tier, rule, policy, 0, 0, f"{kind} prefers {selector.text}", selector.origin)
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
        inner = _Resolution(OPERATORS[piece.operator], piece.call, self.device, self.policy, self.snapshot)
        if piece.chosen.id.startswith(f"{COMPOSITE}."):
            name = piece.chosen.id.partition(".")[2]
            decomposition = next(d for d in inner.operator.decompositions if d.name == name)
            return inner._composite_place(decomposition, piece.chosen.id, piece.chosen.pieces)
        backend, implementation = self.snapshot.implementation(piece.chosen.id)
        return inner.place(backend, implementation, piece.chosen.companion)


def _device_only(condition: Condition) -> bool:
    return all(name.startswith(DEVICE_PREFIX) for name in condition.reads())
