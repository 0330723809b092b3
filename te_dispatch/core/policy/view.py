# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a policy says of the candidates for one call: which it filters out, and where it places the others."""

from __future__ import annotations

import dataclasses
import math

from te_dispatch.core.decision import Rejected
from te_dispatch.core.facts import UNKNOWN, CallFacts, DeviceFacts
from te_dispatch.core.manifest import ORACLE, Implementation
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy.known import FIRST_PARTY_BACKENDS
from te_dispatch.core.policy.model import COMPOSITE, NATIVE, TRAIT_PREFIX, Origin, Policy, Rule, Selector
from te_dispatch.core.snapshot import InstalledBackend, Snapshot

#: Family -> the fact that says whether its products are of quantized operands.
_MULTIPLIED = {"gemm": "a.scaling", "attention": "q.scaling"}

#: The place of what no preference names.
LAST = math.inf


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a candidate stands. Compares by all but `text` and `origin`, in their order; the name breaks what is left.

    Attributes:
        foreign: 1 for a third-party backend that is not native to the device and that no preference selects.
        tier: 0 for a real implementation, 1 for an emulated one, 2 for a composite that materializes.
        rule, policy: positions in the preferences of the first matching rule and of the policy, `LAST` for none.
        composite: 1 for a composite.
        rank: of the implementation.
    """

    foreign: int
    tier: int
    rule: float
    policy: float
    composite: int
    rank: float
    text: str = dataclasses.field(compare=False, default="")
    origin: Origin | None = dataclasses.field(compare=False, default=None)

    def key(self) -> tuple[float, ...]:
        return (self.foreign, self.tier, self.rule, self.policy, self.composite, self.rank)


class PolicyView:
    """A policy seen from one call: the rules that match it, steps 2 and 4 of the dispatch contract.

    Attributes:
        rules: those that speak of the operator or its companion and whose conditions hold.
        ordering: the first of them that sets an order.
        companion: the operator's companion, if it has one.
        emulating: whether the call multiplies quantized operands on a device without FP8 matrix units, where every
            implementation emulates.
    """

    def __init__(
        self, operator: Operator, call: CallFacts, device: DeviceFacts, policy: Policy, snapshot: Snapshot
    ) -> None:
        self.operator = operator
        self.call = call
        self.device = device
        self.policy = policy
        self.snapshot = snapshot
        self.rules = [rule for rule in policy.rules if self.matches(rule)]
        self.ordering = next((rule for rule in self.rules if rule.prefer), None)
        self.companion = OPERATORS[operator.companion] if operator.companion else None
        # Read here and not when a candidate is placed: what is read for one candidate alone may leave the key.
        self.emulating = device["fp8_matmul"] is False and self._multiplies_quantized()

    def _multiplies_quantized(self) -> bool:
        scaling = _MULTIPLIED.get(self.operator.family)
        if scaling is None or scaling not in self.operator.facts:
            return False
        return self.call.get(scaling, UNKNOWN) not in (UNKNOWN, None, "none")

    def of(self, operator: Operator, call: CallFacts) -> PolicyView:
        """Another call on the same device, under the same policy."""
        return PolicyView(operator, call, self.device, self.policy, self.snapshot)

    def of_companion(self) -> PolicyView:
        assert self.companion is not None
        return self.of(self.companion, self.companion_facts())

    def companion_facts(self) -> CallFacts:
        """Of the companion's call, as far as this one determines them."""
        return self.operator.companion_facts(self.call) if self.operator.companion_facts else {}

    def matches(self, rule: Rule) -> bool:
        names = [self.operator.name] + ([self.operator.companion] if self.operator.companion else [])
        if not any(rule.speaks_of(name, self.operator.family) for name in names):
            return False
        return all(condition.check(self.call, self.device).holds is True for condition in rule.when)

    def native(self, backend: InstalledBackend) -> bool:
        return self.device.vendor in backend.manifest.vendors

    def traits(self, implementation: Implementation) -> frozenset[str]:
        """Those of the manifest, and `emulated` where the device makes it so."""
        return implementation.traits | {"emulated"} if self.emulating else implementation.traits

    def filtered(self, backend: InstalledBackend, implementation: Implementation) -> tuple[str, Origin | None] | None:
        """The reason a policy gives against a candidate, and the line it stands on."""
        candidate, native, traits = (
            candidate_id(backend, implementation),
            self.native(backend),
            self.traits(implementation),
        )

        def selected(selectors: tuple[Selector, ...]) -> Selector | None:
            return next((s for s in selectors if s.matches(candidate, native, traits)), None)

        def admitted(selectors: tuple[Selector, ...]) -> bool:
            # Naming one of two companions admits both.
            return selected(selectors) is not None or any(
                s.text in self.partners(backend, implementation) for s in selectors
            )

        for deny in (self.policy.deny, *(rule.deny for rule in self.rules)):
            hit = selected(deny)
            if hit is not None:
                return f"denied by {hit.text!r}", hit.origin
        allowing = next((rule for rule in self.rules if rule.allow is not None), None)
        allow = allowing.allow if allowing else self.policy.allow
        if allow is not None and not admitted(allow):
            listed = ", ".join(s.text for s in allow) or "nothing"
            origin = allow[0].origin if allow else (allowing.origin if allowing else self.policy.origin)
            return f"not among the allowed: {listed}", origin
        for group in (*self.policy.require, *(rule.require for rule in self.rules if rule.require)):
            if group and not admitted(group):
                return f"required: {' or '.join(s.text for s in group)}", group[0].origin
        if ORACLE in implementation.traits and not self._speaks_of(backend, candidate, implementation):
            return f"it is there to compare with: a policy or the caller must name {backend.name!r}", None
        if self.policy.numerics.deterministic and "deterministic" not in implementation.claims:
            return "numerics.deterministic is set and it does not claim to be deterministic", self.policy.origin
        return None

    def _selecting(self) -> list[Selector]:
        """All that is preferred, allowed or required, by the policy and by the rules that match."""
        named = [self.policy.prefer, self.policy.allow or (), *self.policy.require]
        for rule in self.rules:
            named += [rule.prefer, rule.allow or (), rule.require]
        return [selector for group in named for selector in group]

    def _speaks_of(self, backend: InstalledBackend, candidate: str, implementation: Implementation) -> bool:
        """Whether what is preferred, allowed or required names a candidate, its backend, its companion or oracles."""
        texts = {selector.text for selector in self._selecting()}
        own = {candidate, backend.name, TRAIT_PREFIX + ORACLE, *self.partners(backend, implementation)}
        return not texts.isdisjoint(own)

    def partners(self, backend: InstalledBackend, implementation: Implementation) -> frozenset[str]:
        """The backend's own implementations of the companion that save, or read, the same format."""
        if self.companion is None:
            return frozenset()
        return frozenset(
            candidate_id(other, one)
            for other, one in self.snapshot.candidates(self.companion.name)
            if other.name == backend.name and one.saved_format == implementation.saved_format
        )

    def place(self, backend: InstalledBackend, implementation: Implementation, partner: str | None) -> Place:
        candidate, native, traits = (
            candidate_id(backend, implementation),
            self.native(backend),
            self.traits(implementation),
        )

        def index(selectors: tuple[Selector, ...]) -> tuple[float, Selector | None]:
            for position, selector in enumerate(selectors):
                # A preference that names one of two companions places both.
                if selector.text == partner or selector.matches(candidate, native, traits):
                    return position, selector
            return LAST, None

        rule_index, by_rule = index(self.ordering.prefer) if self.ordering else (LAST, None)
        policy_index, by_policy = index(self.policy.prefer)
        named = any(s is not None and s.text in (candidate, partner) for s in (by_rule, by_policy))
        tier = 1 if "emulated" in traits and not named else 0
        selector = by_rule or by_policy
        foreign = selector is None and not native and backend.name not in FIRST_PARTY_BACKENDS
        if selector is not None:
            text = f"{'rule' if by_rule else 'policy'} prefers {selector.text}"
        else:
            text = f"rank {implementation.rank}"
        if tier:
            text += ", after real ones because "
            here = f"{self.device.label()} has no FP8 matrix units"
            text += "it is emulated" if "emulated" in implementation.traits else here
        if foreign:
            here = f"native to {' and '.join(backend.manifest.vendors) or 'no vendor'}, not to {self.device.vendor}"
            text += f", last because its backend is {here}, and no preference names it"
        origin = selector.origin if selector else None
        return Place(int(foreign), tier, rule_index, policy_index, 0, implementation.rank, text, origin)

    def absent(self) -> list[Rejected]:
        """Backends that the policy names and that are not installed: shown, so that nobody wonders."""
        found: dict[str, Rejected] = {}
        for selector in self._selecting():
            backend = selector.text.partition(".")[0]
            if backend in (NATIVE, COMPOSITE) or backend.startswith(TRAIT_PREFIX) or backend in self.snapshot.backends:
                continue
            reason = self.snapshot.absence(backend)
            found.setdefault(selector.text, Rejected(selector.text, reason, "absence", selector.origin))
        return list(found.values())


def candidate_id(backend: InstalledBackend, implementation: Implementation) -> str:
    return f"{backend.name}.{implementation.name}"
