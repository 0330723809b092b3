# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One implementation on one device, as the kit sees it: what it claims of a call, and the call itself.

It is called directly, past dispatch: what is certified is the implementation, not the order of candidates. What it
claims is asked of the same `resolve` that dispatch uses, so that "not claimed" here and "rejected" there are one thing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from te_dispatch.core.decision import Decision
from te_dispatch.core.errors import BindError, Declined
from te_dispatch.core.facts import CallFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import ORACLE, Implementation
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import TRAIT_PREFIX, Policy, Selector
from te_dispatch.core.resolve import resolve
from te_dispatch.core.snapshot import Snapshot


@dataclass(frozen=True)
class Claim:
    """Whether an implementation serves a call: `refusal` is None, or the reason that dispatch would show.

    Attributes:
        companion: the backward (or forward) it is bound with for this call.
        assumed: conditions that nothing could be known about.
        where: the step of the dispatch contract that refused, see `te_dispatch.core.decision.Rejected`.
    """

    refusal: str | None = None
    companion: str | None = None
    assumed: tuple[str, ...] = ()
    where: str = ""


@dataclass
class Calls:
    """What became of an implementation's calls so far.

    Attributes:
        served: how many returned.
        declined: how many raised `Declined`.
        refusal: the message of the last call that raised `Declined` or a `ValueError`.
    """

    served: int = 0
    declined: int = 0
    refusal: str = ""


@dataclass(frozen=True, eq=False)
class Subject:
    """An implementation under test.

    Attributes:
        manager: whose registry it is in.
        operator, id, implementation: what it fulfils, its id, and its manifest's entry.
        device: where it runs.
        calls: what became of `call` so far.
    """

    manager: OpManager
    operator: Operator
    id: str
    implementation: Implementation
    device: torch.device
    calls: Calls = field(default_factory=Calls)

    @property
    def emulated(self) -> bool:
        """Whether its device is emulated on the host."""
        return self.manager.emulation is not None

    @property
    def claims(self) -> frozenset[str]:
        return self.implementation.claims

    @property
    def traits(self) -> frozenset[str]:
        return self.implementation.traits

    def positional(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """All of the operator's arguments in order, defaults filled in.

        Raises:
            TypeError: an argument is missing or unknown.
        """
        unknown = set(arguments) - set(self.operator.signature.parameters)
        if unknown:
            raise TypeError(f"{self.operator.name} has no parameter {sorted(unknown)[0]!r}")
        values = []
        for name, parameter in self.operator.signature.parameters.items():
            value = arguments.get(name, parameter.default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.operator.name} needs {name!r}")
            values.append(value)
        return tuple(values)

    def facts(self, arguments: Mapping[str, Any]) -> CallFacts:
        """The facts of a call as dispatch reads them. Those that hang on a missing `saved` are unknown."""
        values = self.positional(arguments)
        found: dict[str, Any] = {}
        for name, reader in self.manager.fact_readers(self.operator).items():
            if name == "saved" and arguments.get("saved") is None:
                continue
            found[name] = self.operator.facts[name].canonical(reader(*values))
        return found

    def claim(self, arguments: Mapping[str, Any]) -> Claim:
        """Whether dispatch would let this implementation serve the call."""
        facts = self.facts(arguments)
        claim = self._resolved(facts)
        if claim.refusal is not None:  # on a device that it is not for, its libraries need not be there
            return claim
        # Binding finds which parameters its function lacks, and with that which calls it serves.
        with contextlib.suppress(BindError):
            self.manager.functions.bound(self.operator, self.id)
        return self._resolved(facts)

    def _resolved(self, facts: CallFacts) -> Claim:
        """What dispatch decides about this implementation for a call with these facts."""
        decision = _decided(self.manager, self.operator, self.device, facts)
        for accepted in decision.accepted:
            if accepted.id == self.id:
                return Claim(None, accepted.companion, accepted.assumed)
        for rejected in decision.rejected:
            if rejected.id == self.id:
                return Claim(rejected.reason, where=rejected.where)
        return Claim("it is not installed", where="absence")

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Run it. Arguments that are left out have their defaults."""
        function = self.manager.functions.bound(self.operator, self.id)
        try:
            result = function(*self.positional(arguments))
        except Declined as declined:
            self.calls.declined += 1
            self.calls.refusal = f"declined: {declined}"
            raise
        except ValueError as error:
            self.calls.refusal = f"refused: {error}"
            raise
        self.calls.served += 1
        return result

    def companion(self, candidate: str) -> Subject:
        """The subject of an implementation of this operator's companion."""
        assert self.operator.companion is not None
        return subject(self.manager, OPERATORS[self.operator.companion], self.device, candidate)


#: Nothing is preferred, but oracles serve.
_ANY = Policy(prefer=(Selector(TRAIT_PREFIX + ORACLE),))
#: Decisions about the last calls. Every check of a case asks, and all implementations of an operator ask the same.
_KEPT = 256
_decisions: dict[tuple[Any, ...], tuple[Snapshot, Decision]] = {}


def _decided(manager: OpManager, operator: Operator, device: torch.device, facts: Mapping[str, Any]) -> Decision:
    snapshot = manager.snapshot
    device_facts = manager.device_facts(device)
    key = (operator.name, device_facts, tuple(facts.items()))
    kept = _decisions.get(key)
    if kept is not None and kept[0] is snapshot:
        return kept[1]
    decision = resolve(operator, facts, device_facts, _ANY, snapshot)
    while len(_decisions) >= _KEPT:
        _decisions.pop(next(iter(_decisions), key), None)
    _decisions[key] = (snapshot, decision)
    return decision


def subjects(manager: OpManager, operator: Operator, device: torch.device, backend: str | None = None) -> list[Subject]:
    """Every installed implementation of an operator, or those of one backend."""
    return [
        Subject(manager, operator, f"{installed.name}.{implementation.name}", implementation, device)
        for installed, implementation in manager.snapshot.candidates(operator.name)
        if backend in (None, installed.name)
    ]


def subject(manager: OpManager, operator: Operator, device: torch.device, candidate: str) -> Subject:
    """One implementation by id.

    Raises:
        ValueError: nothing of that id implements the operator; lists what does.
    """
    known = subjects(manager, operator, device)
    for one in known:
        if one.id == candidate:
            return one
    names = ", ".join(one.id for one in known) or "none is installed"
    raise ValueError(f"implementation: {candidate!r} does not implement {operator.name}, expected one of: {names}")
