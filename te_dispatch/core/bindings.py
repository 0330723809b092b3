# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""All operators under one effective policy: the unit that a scope enters and an autograd Function remembers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core.decision import Accepted
from te_dispatch.core.dispatcher import Dispatcher
from te_dispatch.core.layers import ProcessLayers
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import Policy, merge

if TYPE_CHECKING:
    from te_dispatch.core.facts import DeviceFacts
    from te_dispatch.core.manager import OpManager
    from te_dispatch.core.snapshot import Snapshot

#: Called after every operator call: (operator, the implementation that ran, arguments by position, result).
Observer = Callable[[Operator, Accepted, tuple[Any, ...], Any], None]


class Bindings:
    """Attributes, beside one callable per operator name:

    makes_calls: whether calls are made, and not only decided (`te_dispatch.core.planning`).
    layers: the scope's own policy layers, strongest first; empty for the process-wide bindings.
    process: the layers below them.
    observer: told of every call, or None.
    token: equal for bindings that resolve alike. Compiled graphs guard on it.
    operand_formats: what `te_dispatch.ops.gemm_operand_format` answered, by its arguments, with the registry and the
        device's facts that it answered for. As many entries as there are pairs of encodings and scalings in use.
    """

    makes_calls = True

    def __init__(
        self,
        manager: OpManager,
        process: ProcessLayers,
        layers: tuple[Policy, ...] = (),
        observer: Observer | None = None,
    ) -> None:
        self.manager = manager
        self.process = process
        self.layers = layers
        self.observer = observer
        self.token = self._token()
        self._policy: Policy | None = None
        self.operand_formats: dict[Any, tuple[Snapshot, DeviceFacts, Any]] = {}
        self.dispatchers: dict[str, Dispatcher] = {}
        self.add_operators()
        manager.tokens[self.token] = self

    def add_operators(self) -> None:
        """A callable for every declared operator that has none."""
        for operator in OPERATORS.values():
            if operator.name not in self.__dict__:
                setattr(self, operator.name, self._first_call(operator))

    def _token(self) -> str:
        return self.process.token(self.layers)

    def _first_call(self, operator: Operator) -> Callable[..., Any]:
        def unresolved(*args: Any) -> Any:
            dispatcher = self.dispatcher(operator)
            return dispatcher.observed(*args) if self.observer else dispatcher.callable(*args)

        return unresolved

    @property
    def policy(self) -> Policy:
        """The effective policy: the scope's layers over the environment's, the process's and the default."""
        if self._policy is None:
            with self.manager.lock:
                self._policy = merge([*self.layers, *self.process.all()])
        return self._policy

    @property
    def snapshot(self) -> Snapshot:
        """The registry that these bindings resolve with."""
        return self.manager.snapshot

    def device_facts(self, device: Any) -> DeviceFacts:
        """Facts of a ``torch.device`` as these bindings resolve for it."""
        return self.manager.device_facts(device)

    def declared(self, candidate: str, field: str) -> Callable[..., Any] | None:
        """See `OpManager.declared`."""
        return self.manager.functions.declared(candidate, field)

    def inside(self, process: ProcessLayers, layers: tuple[Policy, ...], observer: Observer | None) -> Bindings | None:
        """The bindings of a scope that is entered in one of these; None where equal scopes may share theirs.

        Args:
            process, layers: as for the constructor; `layers` has those of the scope itself.
            observer: the scope's own, or None. Whoever observes a block observes the scopes inside it.
        """
        observer = observer or self.observer
        return None if observer is None else Bindings(self.manager, process, layers, observer)

    def dispatcher(self, operator: Operator) -> Dispatcher:
        found = self.dispatchers.get(operator.name)
        if found is None:
            with self.manager.lock:
                found = self.dispatchers.get(operator.name)
                if found is None:
                    found = self.dispatchers[operator.name] = Dispatcher(operator, self)
                    if self.observer is not None:
                        setattr(self, operator.name, found.observed)
        return found

    def publish(self, dispatcher: Dispatcher) -> None:
        """Take a dispatcher's new callable over, and into the trampolines if these bindings are in force."""
        if self.observer is None:
            setattr(self, dispatcher.operator.name, dispatcher.callable)
            self.manager.published(self, dispatcher)
