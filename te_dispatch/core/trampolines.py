# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The functions of `te_dispatch.ops`: what they forward to, and the code they run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.arguments import check_kinds
from te_dispatch.core.atomic import assign
from te_dispatch.core.errors import Declined
from te_dispatch.core.operands import OPERANDS
from te_dispatch.core.operator import OPERATORS, Operator

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings
    from te_dispatch.core.dispatcher import Dispatcher


class Trampolines:
    """One function per operator, with its exact signature, all in one generated module.

    Args:
        label: part of the module's name.
        bindings: those of the process.
        scope: holds those of the scope in force.

    Attributes:
        namespace: the module. Beside the functions it holds what they forward to: ``_gemm`` is the callable of the
            process's bindings, ``_gemm_scoped`` that of the scope in force, ``_gemm_declined`` goes on after a decline
            and ``_gemm_explain`` raises for an argument of a wrong kind.
        functions: by operator name.
    """

    def __init__(self, label: str, bindings: Bindings, scope: ContextVar[Bindings | None]) -> None:
        self.bindings = bindings
        self.namespace = codegen.new_namespace(label)
        self.functions = SimpleNamespace()
        #: The code that only forwards, where no lookup is inlined.
        self._forwarding: dict[str, CodeType] = {}
        #: Every other one that was in use.
        self._codes: list[CodeType] = []
        self._scope = scope
        self.add_operators()

    def add_operators(self) -> None:
        """A function for every declared operator that has none."""
        self.namespace.__dict__.update(OPERANDS.names())  # operands are described before operators are declared
        for operator in OPERATORS.values():
            if operator.name not in self._forwarding:
                self._install(operator)

    def _install(self, operator: Operator) -> None:
        name, scope = operator.name, self._scope
        variables = self.namespace.__dict__
        variables[f"_{name}"] = getattr(self.bindings, name)

        def scoped(*args: Any) -> Any:
            bindings = scope.get() or self.bindings
            try:
                return getattr(bindings, name)(*args)
            except Declined as declined:
                return bindings.dispatcher(operator).declined(declined, *args)
            except (AttributeError, LookupError, TypeError):
                check_kinds(operator, args)
                raise

        def explain(*args: Any) -> None:
            check_kinds(operator, args)

        def declined(exception: Any, *args: Any) -> Any:
            return self.bindings.dispatcher(operator).declined(exception, *args)

        variables[f"_{name}_scoped"] = scoped
        variables[f"_{name}_declined"] = declined
        variables[f"_{name}_explain"] = explain
        function = codegen.trampoline(operator, self.namespace)
        self._forwarding[name] = function.__code__
        setattr(self.functions, name, function)

    def rebinding(self, bindings: Bindings) -> list[tuple[Any, str, Any]]:
        """What to assign so that calls are forwarded to other bindings of the process."""
        changes: list[tuple[Any, str, Any]] = [(self, "bindings", bindings)]
        for name in self._forwarding:
            dispatcher = bindings.dispatchers.get(name)
            code = self._forwarding[name] if dispatcher is None else self._code(dispatcher)
            changes += self._forward(name, getattr(bindings, name), code)
        return changes

    def publish(self, dispatcher: Dispatcher) -> None:
        """Forward to a dispatcher's new callable, or look up in its table right here."""
        assign(self._forward(dispatcher.operator.name, dispatcher.callable, self._code(dispatcher)))

    def _forward(self, name: str, function: Callable[..., Any], code: CodeType) -> list[tuple[Any, str, Any]]:
        return [(self.namespace, f"_{name}", function), (getattr(self.functions, name), "__code__", code)]

    def _code(self, dispatcher: Dispatcher) -> CodeType:
        """A trampoline's body. It stays alive once it was used: torch.compile tells code objects apart by address."""
        lookup = dispatcher.lookup
        if lookup is None or not lookup.keyed:
            return self._forwarding[dispatcher.operator.name]
        table = lookup.table
        if table.code is None:
            table.code = codegen.inlined_code(dispatcher.operator, self.namespace, table)
            self._codes.append(table.code)
        return table.code
