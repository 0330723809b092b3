# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bindings that make calls as others do, through a recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core.bindings import Bindings
from te_dispatch.core.operator import OPERATORS, Operator

if TYPE_CHECKING:
    from te_dispatch.core.dispatcher import Dispatcher

#: (operator, arguments by position, what makes the call of them) -> the call's result.
Maker = Callable[[Operator, "tuple[Any, ...]", Callable[..., Any]], Any]


class RecordingBindings(Bindings):
    """Attributes:
    inner: the bindings that make the calls; their tables, policy and token are these bindings' own.
    """

    def __init__(self, inner: Bindings, maker: Maker) -> None:
        # Not `super().__init__`, which would make tables of its own and register another token.
        self.__dict__.update(inner.__dict__)
        for name in OPERATORS:
            self.__dict__.pop(name, None)
        self.inner = inner
        self._maker = maker

    def __getattr__(self, name: str) -> Any:
        """The function of an operator, made when it is first called."""
        operator = OPERATORS.get(name)
        if operator is None:
            raise AttributeError(name)
        found = self.__dict__[name] = _through(operator, self.inner, self._maker)
        return found

    def dispatcher(self, operator: Operator) -> Dispatcher:
        return self.inner.dispatcher(operator)


def _through(operator: Operator, inner: Bindings, maker: Maker) -> Callable[..., Any]:
    """It does not refer to the bindings that have it: such a cycle would keep what was recorded."""

    def recording(*args: Any) -> Any:
        return maker(operator, args, getattr(inner, operator.name))

    return recording
