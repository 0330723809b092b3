# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The dispatch contract, steps 1 to 4, as one pure function.

1. Facts: the operator, the device's facts and the call's are arguments; nothing is looked up. A fact can be unknown.
2. Filters (`PolicyView.filtered`): a policy's allow, deny and require apply to every backend alike; ``allow: []``
   means none. The policy ``numerics.deterministic`` filters by claim. An oracle serves only where it is named.
3. Requirements (`eligibility`): the device's first, then the call's. Every failure is recorded with its reason.
4. Order (`PolicyView.place`): the first matching rule's prefer, then the policy's, then rank, then name (with a
   warning). Emulated implementations and decompositions that materialize come after every real implementation,
   unless a preference names them by id. Behind all of these come third-party backends that are not native to the
   device and that no preference names: installing one changes nothing on other devices. A composite (`composition`)
   stands at the place of its last-placed piece, behind a real implementation of it.

Companions resolve as one unit (`companions`): a forward is accepted only with a backward that reads what it saves, or
when it declares itself for inference and the call needs no gradient. A preference that names one of the two places
both, and a rule that speaks of one speaks of both.

Steps 5 to 7 (bind, decline, no implementation) are `te_dispatch.core.dispatcher`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from te_dispatch.core.companions import backward_of, forward_of
from te_dispatch.core.composition import Composites
from te_dispatch.core.decision import Accepted, Decision, Rejected
from te_dispatch.core.eligibility import unmet
from te_dispatch.core.facts import CallFacts, DeviceFacts, Recording
from te_dispatch.core.manifest import Implementation
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import COMPOSITE, Policy
from te_dispatch.core.policy.view import LAST, Place, PolicyView, candidate_id
from te_dispatch.core.requirements import Compare
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
        composites = Composites(self, self._resolve)
        for decomposition in self.operator.decompositions:
            with self._section(f"{COMPOSITE}.{decomposition.name}"):
                composite = composites.consider(decomposition, places)
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
            # What saved may be no forward that is known: a preference that names it places its backward all the same.
            saved = self.call.get("saved") if self.operator.saved is not None else None
            partners |= {saved} & named if isinstance(saved, str) else set()
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
                found[candidate] = Place(0, 2, 0, 0, 0, -LAST)
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

    def _consider(self, backend: InstalledBackend, implementation: Implementation) -> Rejected | Accepted:
        candidate = candidate_id(backend, implementation)
        filtered = self.filtered(backend, implementation)
        if filtered is not None:
            return Rejected(candidate, filtered[0], "policy", filtered[1])
        failed, assumed = unmet(self, backend, implementation)
        if failed is not None:
            return Rejected(candidate, failed[1], failed[0])
        partner = self._partner(backend, implementation)
        if isinstance(partner, Rejected):
            return partner
        return Accepted(
            id=candidate,
            distribution=backend.distribution,
            version=backend.version,
            place="",
            companion=partner,
            assumed=tuple(assumed),
            traits=self.traits(implementation),
            saved_format=implementation.saved_format,
        )

    def _partner(self, backend: InstalledBackend, implementation: Implementation) -> str | Rejected | None:
        if self.companion is None:
            return None
        if self.operator.backward:
            return forward_of(self, backend, implementation)
        return backward_of(self, self._resolve, backend, implementation)

    def _resolve(self, operator: Operator, call: CallFacts) -> Decision:
        return resolve(operator, call, self.device, self.policy, self.snapshot)
