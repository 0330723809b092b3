# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that are decided and not made.

`PlanningBindings` stand in for the bindings in force while a module runs on tensors without data. A call is resolved by
the same pure function as ever and noted; its result is what the shape function gives. The bindings in force, their
tables, what has declined, and the registry stay as they are.

Bindings are also what autograd Functions keep for their backwards. So there is one `PlanningBindings` for each call
site, and a backward's calls belong to the module whose forward made them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.arguments import check_kinds
from te_dispatch.core.bindings import Bindings, Observer
from te_dispatch.core.decision import Accepted, Decision, Rejected
from te_dispatch.core.eligibility import ELSEWHERE
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.failures import phrase
from te_dispatch.core.module_plan import FORWARD, PlannedCall
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import COMPOSITE, Policy
from te_dispatch.core.resolve import resolve

if TYPE_CHECKING:
    from te_dispatch.core.dispatcher import Dispatcher
    from te_dispatch.core.layers import ProcessLayers
    from te_dispatch.core.snapshot import Snapshot

#: Serves all modules in one call, under the bindings of whichever asked first.
_OF_ALL_MODULES = frozenset(("update_delayed_scales",))

_numbers = itertools.count()

#: (result of a shape function, the implementation's id, its `saved_format`) -> what the implementation would return.
Returned = Callable[[Any, str, str], Any]


class Planner:
    """One plan in the making.

    Args:
        around: the bindings in force, whose policies hold.
        device: stands for the device of every call; None where each call's own does.
        returned: see `Returned`.

    Attributes:
        calls: noted so far. phase: of those to come.
        snapshot: the manager's registry, with what this plan's imports have shown.
        assumed: what could not be found out.
    """

    def __init__(self, around: Bindings, device: DeviceFacts | None, returned: Returned) -> None:
        self.manager = around.manager
        self.device = device
        self.snapshot: Snapshot = self.manager.snapshot
        self.calls: list[PlannedCall] = []
        self.phase = FORWARD
        self.assumed: dict[str, None] = {}
        self._returned = returned
        self._number = next(_numbers)
        self._bindings: dict[tuple[str, str], PlanningBindings] = {}
        self._decisions: dict[Any, Decision] = {}
        self.root = self.bindings(around.process, around.layers, "")

    def bindings(self, process: ProcessLayers, layers: tuple[Policy, ...], site: str) -> PlanningBindings:
        """One for each policy and call site: modules compare bindings with ``is``."""
        key = process.token(layers), site
        found = self._bindings.get(key)
        if found is None:
            found = self._bindings[key] = PlanningBindings(self, process, layers, site, self._number)
        return found

    def device_facts(self, device: Any) -> DeviceFacts:
        return self.device or self.manager.device_facts(device)

    def call(self, bindings: PlanningBindings, operator: Operator, args: tuple[Any, ...]) -> Any:
        """Note a call, and give what it would return."""
        check_kinds(operator, args)
        device = codegen.reader(operator, self.manager.namespace, operator.device, "device")(*args)
        decision = self._decide(bindings, operator, args, self.device_facts(device))
        site = "" if operator.name in _OF_ALL_MODULES else bindings.site
        self.calls.append(PlannedCall(self.phase, site, decision))
        chosen, shape = decision.chosen, None
        if chosen is not None and not chosen.id.startswith(f"{COMPOSITE}."):
            shape = self.declared(chosen.id, "output_shape")
        result = (shape or operator.shape)(**dict(zip(operator.signature.parameters, args)))
        return result if chosen is None else self._returned(result, chosen.id, chosen.saved_format)

    def _decide(
        self, bindings: PlanningBindings, operator: Operator, args: tuple[Any, ...], device: DeviceFacts
    ) -> Decision:
        facts = self.manager.call_facts(operator, args)
        # The layers of a model repeat one another's calls.
        key = operator.name, tuple(facts.items()), device.label(), device.index, bindings.policy_token
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._resolved(operator, facts, device, bindings.policy)
            self._decisions[key] = decision
        if device.described:
            return decision
        around = self.manager.tokens.get(bindings.policy_token)
        dispatcher = None if around is None else around.dispatchers.get(operator.name)
        return decision if dispatcher is None else _without(decision, dispatcher.declined_before(args))

    def _resolved(self, operator: Operator, facts: Any, device: DeviceFacts, policy: Policy) -> Decision:
        """The decision, after the imports that binding its winner would make where the device is here."""
        while True:
            snapshot = self.snapshot
            decision = resolve(operator, facts, device, policy, snapshot)
            if decision.chosen is None:
                return decision
            if device.described:
                self.assumed |= dict.fromkeys(a for a in decision.chosen.assumed if a.startswith(ELSEWHERE))
                return decision
            self._examine(operator, decision.chosen)
            if self.snapshot is snapshot:
                return decision

    def _examine(self, operator: Operator, accepted: Accepted) -> None:
        for piece in accepted.pieces.values():
            if piece.chosen is not None:
                self._examine(OPERATORS[piece.operator], piece.chosen)
        if not accepted.id.startswith(f"{COMPOSITE}."):
            self.snapshot = self.manager.functions.examined(operator, accepted.id, self.snapshot)

    def declared(self, candidate: str, field: str) -> Callable[..., Any] | None:
        """See `OpManager.declared`. An implementation that cannot be imported here is taken to have none."""
        try:
            return self.manager.functions.declared(candidate, field)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an import runs a plugin's code
            why = f"{candidate} cannot be imported here ({phrase(error)}): assumed without its {field}"
            self.assumed[why] = None
            return None


class PlanningBindings(Bindings):
    """The bindings of one call site while a plan is made.

    Attributes:
        site: of the calls.
        policy_token: of the bindings that they stand for.
    """

    makes_calls = False

    def __init__(
        self, planner: Planner, process: ProcessLayers, layers: tuple[Policy, ...], site: str, number: int
    ) -> None:
        self.planner = planner
        self.site = site
        self.policy_token = process.token(layers)
        self._number = number
        # With an observer, no caller keeps a call to make it again past the bindings.
        super().__init__(planner.manager, process, layers, observer=_told_nothing)

    def _token(self) -> str:
        return f"plan {self._number} of {self.site!r}: {self.policy_token}"

    def _first_call(self, operator: Operator) -> Callable[..., Any]:
        def planned(*args: Any) -> Any:
            return self.planner.call(self, operator, args)

        return planned

    def at(self, site: str) -> PlanningBindings:
        """Those of another call site under the same policy."""
        return self.planner.bindings(self.process, self.layers, site)

    def inside(self, process: ProcessLayers, layers: tuple[Policy, ...], observer: Observer | None) -> Bindings:
        # No call is made, so no observer is told of one.
        return self.planner.bindings(process, layers, self.site)

    @property
    def snapshot(self) -> Snapshot:
        return self.planner.snapshot

    def device_facts(self, device: Any) -> DeviceFacts:
        return self.planner.device_facts(device)

    def declared(self, candidate: str, field: str) -> Callable[..., Any] | None:
        return self.planner.declared(candidate, field)

    def dispatcher(self, operator: Operator) -> Dispatcher:
        raise DispatchError(f"{operator.name}: no call can be made while a module is planned")


def _told_nothing(*_: Any) -> None:
    """Nothing is done about calls that are not made."""


def _without(decision: Decision, declined: dict[str, str]) -> Decision:
    """The decision after candidates have declined the call."""
    if not declined:
        return decision
    left = tuple(accepted for accepted in decision.accepted if accepted.id not in declined)
    gone = tuple(Rejected(a.id, declined[a.id], "decline") for a in decision.accepted if a.id in declined)
    return dataclasses.replace(decision, accepted=left, rejected=(*gone, *decision.rejected))
