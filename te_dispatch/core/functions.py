# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The functions that manifests name, imported once for each registry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core.bind import callable_of, import_declared, import_target, load
from te_dispatch.core.errors import BindError
from te_dispatch.core.failures import on_request, traceback_text
from te_dispatch.core.importing import released
from te_dispatch.core.operator import Operator
from te_dispatch.core.results import checked
from te_dispatch.core.snapshot import Snapshot

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager

_log = logging.getLogger("te_dispatch")

#: Manifest field -> the attribute that stood for it in API version 1, where the name is another.
_ATTRIBUTES = {"plan": "prepared"}


class Functions:
    """Implementations and what else their manifests name, as functions of one registry; another registry has its own.

    Plugins' code is imported without the manager's lock.
    """

    def __init__(self, manager: OpManager) -> None:
        self._manager = manager
        self._bound: dict[str, Callable[..., Any]] = {}
        #: (candidate, field of its manifest) -> the function named there
        self._declared: dict[tuple[str, str], Callable[..., Any] | None] = {}
        #: candidate -> as bound, and with every result checked
        self._checked: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def bound(self, operator: Operator, candidate: str) -> Callable[..., Any]:
        """An implementation, imported and checked, as a callable that takes every argument by position.

        Raises:
            BindError: after putting the reason into the manager's snapshot.
        """
        found = self._bound.get(candidate)
        if found is not None:
            return found
        manager = self._manager
        _, implementation = manager.snapshot.implementation(candidate)
        try:
            with released(manager.lock):
                function, lacking = load(operator, candidate, implementation.target)
        except BindError as error:
            with manager.lock:
                if manager.functions is self and candidate not in manager.snapshot.unusable:
                    _log.warning("%s%s", error, on_request(traceback_text(error)))
                    manager.amend_snapshot(manager.snapshot.with_unusable(candidate, _reason(candidate, error)))
            raise
        with manager.lock:
            if lacking and manager.functions is self and candidate not in manager.snapshot.lacking:
                manager.amend_snapshot(manager.snapshot.with_lacking(candidate, lacking))
            return self._bound.setdefault(candidate, callable_of(operator, implementation.traits, function, lacking))

    def examined(self, operator: Operator, candidate: str, snapshot: Snapshot) -> Snapshot:
        """A snapshot that also says whether an implementation can be imported, and which parameters it lacks. The
        manager's own snapshot does not change."""
        if candidate in self._bound or candidate in snapshot.lacking:
            return snapshot
        _, implementation = snapshot.implementation(candidate)
        try:
            with released(self._manager.lock):
                _, lacking = load(operator, candidate, implementation.target)
        except BindError as error:
            return snapshot.with_unusable(candidate, _reason(candidate, error))
        return snapshot.with_lacking(candidate, lacking) if lacking else snapshot

    def checking(self, operator: Operator, candidate: str, bound: Callable[..., Any]) -> Callable[..., Any]:
        """The same as `bound`, with every result checked."""
        found = self._checked.get(candidate)
        if found is None or found[0] is not bound:
            found = self._checked[candidate] = (bound, checked(operator, candidate, bound))
        return found[1]

    def declared(self, candidate: str, field: str) -> Callable[..., Any] | None:
        """The function that an implementation's manifest names in a field: ``plan``, ``operand_format`` or
        ``output_shape``; None where it names none. A plugin of API version 1 has an attribute of its function instead.

        Raises:
            BindError: it cannot be imported, or is not callable.
        """
        if (candidate, field) in self._declared:
            return self._declared[candidate, field]
        _, implementation = self._manager.snapshot.implementation(candidate)
        target = getattr(implementation, field)
        with released(self._manager.lock):
            if target is None:
                function = getattr(import_target(implementation.target), _ATTRIBUTES.get(field, field), None)
            else:
                function = import_declared(target, f"{candidate}: its {field}")
        if function is not None and not callable(function):
            raise BindError(f"{candidate}: its {field} is {type(function).__name__}, not callable")
        self._declared[candidate, field] = function
        return function


def _reason(candidate: str, error: BindError) -> str:
    """An error's message for those who show it beside the implementation's id."""
    return str(error).removeprefix(f"{candidate}: ")
