# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The OpManager: one per process by default, more where a test or a tool wants its own.

One immutable snapshot is the truth and is replaced in one assignment; everything else is a cache of what follows from
it. The lock guards writers only: nothing on the hot path takes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.announcements import Announcements
from te_dispatch.core.atomic import assign
from te_dispatch.core.bind import import_target
from te_dispatch.core.bindings import Bindings, Observer
from te_dispatch.core.decision import Decision
from te_dispatch.core.devices import is_imitation, is_traced, probe_backends
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue
from te_dispatch.core.functions import Functions
from te_dispatch.core.hooks import HOOKS
from te_dispatch.core.importing import refuse_while_importing, released
from te_dispatch.core.layers import ProcessLayers, Sources
from te_dispatch.core.mirror import Mirror
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import Policy
from te_dispatch.core.process_devices import ProcessDevices
from te_dispatch.core.results import checking_results
from te_dispatch.core.scope import Scope
from te_dispatch.core.shadow import Shadows
from te_dispatch.core.snapshot import Snapshot
from te_dispatch.core.startup import no_collection
from te_dispatch.core.trampolines import Trampolines

if TYPE_CHECKING:
    from te_dispatch.core.dispatcher import Dispatcher
    from te_dispatch.core.emulation import Emulation
    from te_dispatch.core.policy.known import Known

_log = logging.getLogger("te_dispatch")
_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()

#: How many bindings are kept for the next scope, or the next `set_policy`, that asks for the same.
_KEPT = 128


class OpManager:
    """Holds the registry, the policies and the trampolines.

    Args:
        snapshot: registry to use; None discovers installed backends at the first resolution.
        environ: environment variables to read; None for the process's, read at the first resolution.
        label: part of the generated module's name.
    """

    def __init__(
        self, snapshot: Snapshot | None = None, environ: Mapping[str, str] | None = None, label: str = "manager"
    ) -> None:
        self.lock = threading.RLock()
        #: A registry as it was given, without what is unavailable on this machine; None to discover one.
        self._given = snapshot
        #: The registry, once every backend was asked whether it works here.
        self._snapshot: Snapshot | None = None
        #: How many registries there were before it.
        self._registry = 0
        self._environ = environ
        self._layers = ProcessLayers(Sources(environ, self.known))
        #: The devices of this process, as backends of the registry know them.
        self.devices = ProcessDevices(self)
        #: What executes the kernels of an emulated device that the CPU counts as; None where it counts as itself.
        self.emulation: Emulation | None = None
        self._known: Known | None = None
        #: What the registry's manifests name.
        self.functions = Functions(self)
        #: Whether every result is checked, None until the environment is read.
        self._checking: bool | None = None
        self._readers: dict[str, dict[str, Callable[..., Any]]] = {}
        self._announcements = Announcements()
        #: token -> bindings, least recently asked for first.
        self._kept: dict[str, Bindings] = {}
        self._generations = itertools.count(1)
        #: What the environment said -> the generation in which it did.
        self._environments: dict[str, int] = {}
        #: ids of scopes
        self._open: set[int] = set()
        #: Bindings by what compiled graphs know them by.
        self.tokens: weakref.WeakValueDictionary[str, Bindings] = weakref.WeakValueDictionary()
        self.current: ContextVar[Bindings | None] = ContextVar(f"te_dispatch.{label}.scope", default=None)
        #: Of the entering that set it.
        self.mark: ContextVar[object] = ContextVar(f"te_dispatch.{label}.mark", default=None)
        self.mirror = Mirror()
        #: Of calls that are compared with another backend's (`te_dispatch.core.shadow`).
        self.shadows = Shadows(self)
        self.probe_problems: list[str] = []
        self.bindings = self._bindings(self._layers)
        self._trampolines = Trampolines(label, self.bindings, self.current)
        self.namespace = self._trampolines.namespace
        self.ops = self._trampolines.functions
        _managers.add(self)

    def add_operators(self) -> None:
        """Make functions for operators that were declared after this manager was made, and leave the others."""
        with self.lock:
            for bindings in list(self.tokens.values()):
                bindings.add_operators()
            self._trampolines.add_operators()

    # -- registry -------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The registry, discovered on first use."""
        found = self._snapshot
        return self._take_stock() if found is None else found

    def _take_stock(self) -> Snapshot:
        """Discover what is installed, and ask what of it works here.

        Plugins' code runs without the lock, so two threads may both come here; the first to finish is believed.
        """
        from te_dispatch.core.discovery import find, report

        refuse_while_importing("using operators or policies")
        if self._given is None and not OPERATORS:
            raise DispatchError("no operators are declared in this process; import te_dispatch.ops")
        while True:
            with self.lock:
                registry, given = self._registry, self._given
            with released(self.lock), no_collection():
                snapshot = find(OPERATORS) if given is None else given
                found, problems = probe_backends(snapshot)
            with self.lock:
                if self._registry != registry:
                    continue
                if self._snapshot is None:
                    # Last: an interrupt before this line leaves everything to be asked again.
                    self._snapshot = found
                    if given is None:
                        report(found)
                    self.report_problems(problems)
                return self._snapshot

    def amend_snapshot(self, snapshot: Snapshot) -> None:
        """Note what was found out about the registry's implementations. The caller holds the lock."""
        self._snapshot = snapshot

    def implementation(self, operator: Operator, candidate: str) -> Callable[..., Any]:
        """An implementation as calls run it: where the environment asks for it with every result checked.

        Raises:
            BindError: it cannot be imported.
        """
        functions = self.functions
        bound = functions.bound(operator, candidate)
        if self._checking is None:
            self._checking = self._reads_checking()
        return functions.checking(operator, candidate, bound) if self._checking else bound

    def _reads_checking(self) -> bool:
        return checking_results(os.environ if self._environ is None else self._environ)

    def fact_readers(self, operator: Operator) -> dict[str, Callable[..., Any]]:
        found = self._readers.get(operator.name)
        if found is None:
            found = self._readers[operator.name] = {
                name: codegen.reader(operator, self.namespace, fact.expression, "fact")
                for name, fact in operator.facts.items()
            }
        return found

    def call_facts(self, operator: Operator, args: tuple[Any, ...]) -> dict[str, FactValue]:
        """All facts of a call, canonical. A fact whose expression does not apply to these arguments is unknown."""
        readers = self.fact_readers(operator)
        out: dict[str, FactValue] = {}
        for name, fact in operator.facts.items():
            try:
                out[name] = fact.canonical(readers[name](*args))
            except (AttributeError, IndexError, TypeError):
                out[name] = UNKNOWN
        return out

    # -- devices --------------------------------------------------------------------------------------------------

    def device_facts(self, device: Any) -> DeviceFacts:
        """Facts of a ``torch.device`` (or anything with ``type`` and ``index``), probed once."""
        return self.devices.facts(device)

    def stand_in(self, facts: DeviceFacts | None, emulation: Emulation | None) -> None:
        """Let the CPU count as another device (`te_dispatch.core.emulation`), or as itself again for None. Calls made
        afterwards resolve anew."""
        with self.lock:
            layers = dataclasses.replace(self._layers, generation=next(self._generations))
            self._change(
                layers,
                (self, "devices", ProcessDevices(self, facts)),
                (self, "emulation", emulation),
                (self, "_kept", {}),
                (self, "_environments", {}),
            )

    def report_problems(self, problems: list[str]) -> None:
        """Warn of what probes did wrong, and keep it for whoever asks."""
        for problem in problems:
            _log.warning("%s", problem)
        self.probe_problems += problems

    def imitated(self, device: Any, args: tuple[Any, ...]) -> bool:
        return is_imitation(device, args)

    def imitation(self, operator: Operator, device: Any, args: tuple[Any, ...]) -> Any:
        """The result of a call on meta or fake tensors: shapes, and where a graph is made of them, what computes it."""
        if device.type != "meta" and is_traced():
            return import_target(HOOKS["traced_call"])(operator, args)
        return operator.shape(**dict(zip(operator.signature.parameters, args)))

    def announce(self, decision: Decision) -> None:
        """Warn, once each, of what a user should know about a decision."""
        contents = self._layers.sources.contents
        self._announcements.announce(decision, None if contents is None else contents.debug)

    # -- policies -------------------------------------------------------------------------------------------------

    def process_layers(self) -> list[Policy]:
        """The layers below any scope, strongest first: environment, `set_policy`, the shipped default."""
        with self.lock:
            return self._layers.all()

    def known(self) -> Known:
        """The words that policies may use on this machine."""
        from te_dispatch.core.policy.known import Known

        if self._known is None:
            self._known = Known.of([b.manifest for b in self.snapshot.backends.values()], OPERATORS)
        return self._known

    def set_policy(self, policy: Policy | str | os.PathLike[str] | None) -> None:
        """Put a policy in force for the whole process, below the environment's; None goes back to the default.

        Calls made afterwards resolve anew; backwards of earlier forwards run under the policy those saw.

        Raises:
            PolicyError: nothing is changed.
        """
        refuse_while_importing("set_policy")
        layer = None if policy is None else self._layers.sources.load(policy)
        with self.lock:
            self._change(dataclasses.replace(self._layers, chosen=layer))

    def reload_environment(self) -> None:
        """Read TE_DISPATCH_* and NVTE_* again.

        Raises:
            PolicyError: a variable cannot be used; what was in force stays.
        """
        refuse_while_importing("reload_environment")
        with self.lock:
            sources = self._layers.sources.again()
            checking, checked_before = self._reads_checking(), self._checking
            said = f"{sources.read().digest()} {checking}"  # may let other threads have the lock
            before = self._layers.sources.contents
            if before is not None:
                self._environments.setdefault(f"{before.digest()} {bool(checked_before)}", self._layers.generation)
            generation = self._environments.get(said)
            if generation is None:
                generation = self._environments[said] = next(self._generations)
            layers = dataclasses.replace(self._layers, sources=sources, generation=generation)
            self._change(layers, (self, "_checking", checking))

    @property
    def watched(self) -> tuple[Any, ...] | None:
        """What the variables of `te_dispatch.core.watched` were when the environment was read; None before."""
        return self._layers.sources.watched

    def replace_snapshot(self, snapshot: Snapshot | None = None) -> None:
        """Take another registry into use, at once and for cached calls too; None discovers what is installed now.

        Scopes that are open keep what they had resolved: their backwards must find their forwards' implementations.
        """
        refuse_while_importing("replace_snapshot")
        with self.lock:
            layers = dataclasses.replace(
                self._layers, sources=self._layers.sources.again(), generation=next(self._generations)
            )
            self._change(
                layers,
                (self, "_given", snapshot),
                (self, "_snapshot", None),
                (self, "_registry", self._registry + 1),
                (self, "_known", None),
                (self, "devices", ProcessDevices(self, self.devices.stand_in)),
                (self, "functions", Functions(self)),
                (self, "_kept", {}),
                (self, "_environments", {}),
            )

    def _change(self, layers: ProcessLayers, *others: tuple[Any, str, Any]) -> None:
        """Put other layers in force for the process, together with `others`."""
        bindings = self._bindings(layers)
        replaced = (self.bindings, self._kept)  # alive until all is assigned
        changes = [*others, (self, "_layers", layers), (self, "bindings", bindings)]
        assign([*changes, *self._trampolines.rebinding(bindings)])
        del replaced

    def published(self, bindings: Bindings, dispatcher: Dispatcher) -> None:
        """A dispatcher's new callable becomes the trampoline's, if its bindings are still those of the process."""
        if bindings is self.bindings:
            self._trampolines.publish(dispatcher)

    # -- scopes ---------------------------------------------------------------------------------------------------

    def _bindings(self, process: ProcessLayers, layers: tuple[Policy, ...] = ()) -> Bindings:
        """Equal layers share their bindings, and what these bound."""
        token = process.token(layers)
        with self.lock:
            found = self._kept.pop(token, None) or Bindings(self, process, layers)
            self._kept[token] = found
            while len(self._kept) > _KEPT:
                self._kept.pop(next(iter(self._kept)))
            return found

    def capture(self) -> Bindings:
        """The bindings in force here and now; give them to `reenter` elsewhere."""
        return self.current.get() or self.bindings

    def reenter(self, bindings: Bindings) -> Scope:
        """Run a block under bindings captured elsewhere, e.g. a backward under its forward's."""
        return Scope(self, lambda: bindings)

    def count_scope(self, scope: Scope, entered: bool) -> None:
        """Note that a scope is in force or not; to say so again changes nothing."""
        with self.lock:
            (self._open.add if entered else self._open.discard)(id(scope))
            # A flag and not the number: torch.compile guards on its value.
            self.namespace.__dict__["_scoped"] = bool(self._open)

    def scope(self, layer: Policy, observer: Observer | None = None) -> Bindings:
        """Bindings of the current scope with one more layer on top. Equal scopes share theirs, and what they bound."""
        refuse_while_importing("a scoped policy")
        outer = self.current.get()
        layers = (layer, *(outer.layers if outer is not None else ()))
        if outer is not None:
            own = outer.inside(self._layers, layers, observer)
        else:
            own = None if observer is None else Bindings(self, self._layers, layers, observer)
        return self._bindings(self._layers, layers) if own is None else own

    def policy(self, policy: Policy | str | os.PathLike[str]) -> Scope:
        """Scope a policy: a shipped name, a file, or a `Policy`."""
        return Scope(self, lambda: self.scope(self._layers.sources.load(policy)))

    def using(self, *, prefer: Mapping[str, Any] | None = None, **require: Any) -> Scope:
        """Scope a choice: ``using(gemm="triton")`` requires it, ``using(prefer={"gemm": "triton"})`` prefers it.

        Keys are operators or families; values a backend, an implementation id, ``native``, or a list of these.
        Entering raises `PolicyError` for an unknown operator or backend, with the nearest known word.
        """
        from te_dispatch.core.environment import using_layer

        return Scope(self, lambda: self.scope(using_layer(self.known(), prefer, **require)))

    def observe(self, observer: Observer) -> Scope:
        """Call `observer` after every operator call in the block; slower, for counting and checking."""
        return Scope(self, lambda: self.scope(Policy(name="observed"), observer))

    def replace_locks(self) -> None:
        """In a forked child: another thread may have held the lock, and it does not exist here."""
        self.lock = threading.RLock()


def _after_fork() -> None:
    for manager in list(_managers):
        manager.replace_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
