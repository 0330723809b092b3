# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Steps 5 to 7 of the dispatch contract for one operator under one policy: bind, call, decline, give up.

A dispatcher owns the callable that its operator's trampoline forwards to. It starts as `Dispatcher.miss`, which
resolves; afterwards it is either the bound implementation itself, where nothing about a call could change the winner,
or a generated function that looks the winner up by exactly the facts that resolution read. When a new call reads
more facts, the function is generated again with the larger key.

`Declined`, raised before anything is written, moves one call on to the next candidate. It is remembered for that
call's shapes and options alone; the memory is consulted only under keys where something has declined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.arguments import check_kinds
from te_dispatch.core.bind import positional
from te_dispatch.core.decision import Accepted, Decision
from te_dispatch.core.entries import Declines, Entry, Lookup, describe
from te_dispatch.core.errors import BindError, Declined, DispatchError, NoImplementation
from te_dispatch.core.facts import DeviceFacts, FactValue
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import COMPOSITE
from te_dispatch.core.resolve import resolve, resolve_recorded
from te_dispatch.core.results import check_class
from te_dispatch.core.tables import NO_DEVICE, Atom, Table

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings


#: Makes a callable of the implementation that a candidate, no composite, stands for.
Part = Callable[["Dispatcher", Accepted], Callable[..., Any]]


class Dispatcher:
    """One operator under one `Bindings`."""

    def __init__(self, operator: Operator, bindings: Bindings) -> None:
        self.operator = operator
        self.bindings = bindings
        self.manager = bindings.manager
        #: None until the first resolution. Replaced as a whole: whatever comes in between, its parts belong together.
        self.lookup: Lookup | None = None
        self._published: Lookup | None = None
        #: What the trampoline forwards to.
        self.callable: Callable[..., Any] = self.miss
        self.device_of = codegen.reader(operator, self.manager.namespace, operator.device, "device")
        #: candidate -> the implementation, and the same with some of its calls compared (`te_dispatch.core.shadow`)
        self._sampled: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    @property
    def entries(self) -> dict[Any, Entry]:
        return {} if self.lookup is None else self.lookup.entries

    # -- the slow path --------------------------------------------------------------------------------------------

    def miss(self, *args: Any) -> Any:
        """Resolve, publish the result, and make the call."""
        check_kinds(self.operator, args)
        device = self.device_of(*args)
        if self.manager.imitated(device, args):
            return self.manager.imitation(self.operator, device, args)
        entry = self.entry(args, device)
        try:
            result = entry.bound(*args)
        except Declined as declined:
            return self.declined(declined, *args)
        check_class(self.operator, entry.chosen.id, result)
        return result

    def entry(self, args: tuple[Any, ...], device: Any = None) -> Entry:
        """The entry a call belongs to, resolved if need be."""
        with self.manager.lock:
            if self.lookup is not None:
                found = self.lookup.entries.get(self.lookup.key(*args))
                if found is not None:
                    return found
            self.manager.devices.refuse_during_capture(self.operator.name)
            facts = self.manager.device_facts(device if device is not None else self.device_of(*args))
            decision, reads, bound = self._resolve_and_bind(self.facts(args), facts)
            reads, by_device = self._elsewhere(decision, reads)
            return self._publish(args, decision, reads, by_device, bound)

    def facts(self, args: tuple[Any, ...]) -> dict[str, FactValue]:
        return self.manager.call_facts(self.operator, args)

    def _resolve_and_bind(
        self, call: dict[str, FactValue], device: DeviceFacts
    ) -> tuple[Decision, frozenset[Atom], Callable[..., Any]]:
        while True:
            snapshot = self.manager.snapshot
            decision, reads = resolve_recorded(self.operator, call, device, self.bindings.policy, snapshot)
            if decision.chosen is None:
                raise NoImplementation(decision.table())
            try:
                bound = self.bind(decision.chosen)
            except BindError:
                bound = None
            # A failed import, or a signature found to lack a parameter, made a new snapshot: decide again.
            if self.manager.snapshot is snapshot:
                assert bound is not None
                self.manager.announce(decision)
                return decision, reads, bound

    def _elsewhere(self, decision: Decision, reads: frozenset[Atom]) -> tuple[frozenset[Atom], bool]:
        """The facts that matter on any device of this process, and whether the device itself does.

        It does not where the same call has the same winner on all of them and that winner takes meta and fake
        tensors, as one made of PyTorch operations does.
        """
        if not _traceable(decision):
            return reads, True
        assert decision.chosen is not None
        for device in self.manager.devices.seen() if self.manager.devices.several() else ():
            other, others_reads = resolve_recorded(
                self.operator, decision.call, device, self.bindings.policy, self.manager.snapshot
            )
            if other.chosen is None or not _same(other.chosen, decision.chosen):
                return reads, True
            reads |= others_reads
        return reads, False

    def bind(self, accepted: Accepted, part: Part | None = None) -> Callable[..., Any]:
        """A callable for a candidate that takes every argument by position.

        Args:
            part: makes it of an implementation: the candidate's, or each piece's where it is a composite. By default
                `part`, whose calls a policy with `shadow` may compare, and whose results may be checked.

        Raises:
            BindError: after recording the failure in a new snapshot.
        """
        if not accepted.id.startswith(f"{COMPOSITE}."):
            return (part or Dispatcher.part)(self, accepted)
        name = accepted.id.partition(".")[2]
        decomposition = next(d for d in self.operator.decompositions if d.name == name)
        pieces = {}
        for piece_name, piece in accepted.pieces.items():
            assert piece.chosen is not None
            dispatcher = self.bindings.dispatcher(OPERATORS[piece.operator])
            # The whole's key holds every fact that the pieces' resolutions read, so their winners are fixed here.
            pieces[piece_name] = codegen.guarding(
                dispatcher.operator,
                self.manager.namespace,
                dispatcher.bind(piece.chosen, part),
                dispatcher.piece_declined(piece.chosen.id),
            )
        return positional(self.operator, decomposition.build(**pieces), ())

    def part(self, accepted: Accepted) -> Callable[..., Any]:
        """An implementation that takes every argument by position, as eager calls make use of it."""
        return self._sample(accepted.id, self.manager.implementation(self.operator, accepted.id))

    def _sample(self, candidate: str, bound: Callable[..., Any]) -> Callable[..., Any]:
        """An implementation, behind a countdown to the next call that is compared where the policy asks for it."""
        policy = self.bindings.policy
        if policy.shadow is None:
            return bound
        found = self._sampled.get(candidate)
        if found is None or found[0] is not bound:
            sampled = self.manager.shadows.sampler(self.operator, candidate, bound, policy.shadow, policy.digest())
            found = self._sampled[candidate] = (bound, sampled)
        return found[1]

    def _publish(
        self,
        args: tuple[Any, ...],
        decision: Decision,
        reads: frozenset[Atom],
        by_device: bool,
        bound: Callable[..., Any],
    ) -> Entry:
        self.lookup = lookup = self._grown(reads, by_device)
        entry = Entry(decision, bound)
        self._route(lookup, args, bound)
        # Last: a call that was interrupted on the way here resolves again.
        lookup.entries[lookup.key(*args)] = entry
        return entry

    def _grown(self, reads: frozenset[Atom], by_device: bool) -> Lookup:
        """A lookup that tells apart what these reads tell apart: the present one, or another with a larger key."""
        before = self.lookup
        atoms, by_device = (before.atoms, by_device or before.by_device) if before else ((), by_device)
        grown = [atom for atom in sorted(reads, key=repr) if atom not in atoms and atom[0] in self.operator.facts]
        if before is not None and not grown and by_device == before.by_device:
            return before
        # New objects throughout: a thread may still be running the function that reads the old ones.
        atoms = (*atoms, *grown)
        expression = codegen.key_expression(self.operator, atoms, by_device)
        return Lookup(
            atoms,
            by_device,
            key=codegen.reader(self.operator, self.manager.namespace, expression, "key"),
            table=Table(self.operator, atoms, self.manager.devices.mode() if by_device else NO_DEVICE, self.miss),
            entries={},
            superseded=(*before.superseded, *before.entries.values()) if before else (),
        )

    def _route(self, lookup: Lookup, args: tuple[Any, ...], function: Callable[..., Any]) -> None:
        """Let calls with the same key as this one go to `function`."""
        if self.bindings.observer is not None:
            return  # every call is seen
        if not lookup.keyed:
            self.callable = function
        else:
            lookup.insert(args, self.device_of(*args), function)
            if self._published is lookup:
                return  # the generated functions read the table that has just grown
            self.callable = codegen.keyed(self.operator, self.manager.namespace, lookup.table)
        self.bindings.publish(self)
        self._published = lookup

    # -- declining ------------------------------------------------------------------------------------------------

    def declined(self, declined: Declined, *args: Any) -> Any:
        """Go on after the first candidate of this call's entry declined."""
        entry = self.entry(args)
        return self._fall_back(entry, entry.chosen.id, declined, args)[1]

    def piece_declined(self, candidate: str) -> Callable[..., Any]:
        """`declined` for a candidate bound into a composite, which need not be first for such a call made directly."""

        def declined(exception: Declined, *args: Any) -> Any:
            return self._fall_back(self.entry(args), candidate, exception, args)[1]

        return declined

    def _fall_back(
        self, entry: Entry, candidate: str, declined: Declined, args: tuple[Any, ...]
    ) -> tuple[Accepted, Any]:
        if self.operator.backward:
            # The forward checked the backward's requirements, and gradients of two kernels must not be mixed.
            message = f"{candidate} declined a backward ({declined}); a backward's conditions belong in its manifest"
            raise DispatchError(message) from declined
        call = describe(args)
        entry.remember(call, candidate, declined)
        self._guard(args, entry)
        return self._run(entry, call, args, declined)

    def _guard(self, args: tuple[Any, ...], entry: Entry) -> None:
        """From now on ask the memory first, under this key only."""

        def guarded(*args: Any) -> Any:
            call = describe(args)
            if call in entry.memory:
                return self._run(entry, call, args)[1]
            try:
                return entry.bound(*args)
            except Declined as declined:
                entry.remember(call, entry.chosen.id, declined)
                return self._run(entry, call, args, declined)[1]

        with self.manager.lock:
            assert self.lookup is not None  # the entry comes from one
            self._route(self.lookup, args, guarded)

    def _run(
        self, entry: Entry, call: Any, args: tuple[Any, ...], last: Declined | None = None
    ) -> tuple[Accepted, Any]:
        """Try the candidates that have not declined this call, in order.

        The entry's own decision speaks of the call that made it. Calls of one key share its winner and may differ in
        everything else, so what comes after the winner is decided from this call's facts.
        """
        device = self.device_of(*args)
        if self.manager.imitated(device, args):
            return entry.chosen, self.manager.imitation(self.operator, device, args)
        memory = entry.memory.get(call) or Declines()
        while True:
            snapshot = self.manager.snapshot
            if memory.decision is None or memory.snapshot is not snapshot:
                facts, where = self.facts(args), self.manager.device_facts(device)
                memory.decision = resolve(self.operator, facts, where, self.bindings.policy, snapshot)
                memory.snapshot = snapshot
            accepted = next((a for a in memory.decision.accepted if a.id not in memory.reasons), None)
            if accepted is None:
                reasons = "\n".join(f"  {name}  declined: {why}" for name, why in memory.reasons.items())
                table = memory.decision.table()
                raise NoImplementation(f"{table}\nevery candidate declined:\n{reasons}") from (last or memory.last)
            with contextlib.suppress(BindError):
                bound = self.bind(accepted)
            # A failed import, or a signature found to lack a parameter, made a new snapshot: decide again.
            if self.manager.snapshot is not snapshot:
                continue
            try:
                return accepted, bound(*args)
            except Declined as declined:
                last = declined
                memory.add(accepted.id, declined)

    def declined_before(self, args: tuple[Any, ...]) -> dict[str, str]:
        """Candidates that have declined a call like this one, and why. Nothing is resolved for it."""
        lookup = self.lookup
        if lookup is None:
            return {}
        call = describe(args)
        for entry in (*lookup.entries.values(), *lookup.superseded):
            found = entry.memory.get(call)
            if found is not None:
                return dict(found.reasons)
        return {}

    # -- observation ----------------------------------------------------------------------------------------------

    def observed(self, *args: Any) -> Any:
        """Make a call and tell the bindings' observer which implementation ran."""
        check_kinds(self.operator, args)
        device = self.device_of(*args)
        if self.manager.imitated(device, args):
            return self.miss(*args)
        entry = self.entry(args, device)
        call = describe(args)
        if call in entry.memory:
            ran, result = self._run(entry, call, args)
        else:
            try:
                ran, result = entry.chosen, entry.bound(*args)
            except Declined as declined:
                ran, result = self._fall_back(entry, entry.chosen.id, declined, args)
        assert self.bindings.observer is not None
        check_class(self.operator, ran.id, result)
        self.bindings.observer(self.operator, ran, args, result)
        return result


def _same(one: Accepted, other: Accepted) -> bool:
    """Whether two candidates are the same implementation, with the same pieces if composite."""
    if one.id != other.id or one.pieces.keys() != other.pieces.keys():
        return False
    pairs = [(piece.chosen, other.pieces[name].chosen) for name, piece in one.pieces.items()]
    return all(a is not None and b is not None and _same(a, b) for a, b in pairs)


def _traceable(decision: Decision) -> bool:
    """Whether every candidate that may run consists of PyTorch operations, which accept meta and fake tensors."""
    chosen = decision.chosen
    if chosen is None:
        return False
    if chosen.pieces:
        return all(_traceable(piece) for piece in chosen.pieces.values())
    return "plain_torch" in chosen.traits
