# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Entering bindings for a block of code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, suppress
from contextvars import Token
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings
    from te_dispatch.core.manager import OpManager


class Scope(ContextDecorator):
    """A context manager under which calls go to other bindings; as a decorator it runs each call under them.

    An interrupt may come between any two lines, in ``__enter__`` and ``__exit__`` too. So leaving can be repeated, and
    it undoes as much as was done. Where an interrupt keeps ``__exit__`` from starting, the scope ends when its last
    reference goes.

    Args:
        manager: whose scope it is.
        bindings: gives those to enter; called on entering, under the scopes that are open then.
    """

    def __init__(self, manager: OpManager, bindings: Callable[[], Bindings]) -> None:
        self._manager = manager
        self._bindings = bindings
        self._tokens: list[Token[Any]] = []
        self._shown: list[tuple[Bindings | None, object]] = []
        #: Tells this entering from others, which may enter the same bindings.
        self._mark: object = None
        #: That of the thread that is in the scope.
        self._thread = 0

    def _recreate_cm(self) -> Scope:
        return Scope(self._manager, self._bindings)

    def __enter__(self) -> None:
        if self._thread:
            raise RuntimeError("this scope is in force already; make another for a block inside it")
        bindings = self._bindings()
        self._mark = mark = object()
        mirror = self._manager.mirror
        try:
            self._thread = get_ident()
            self._manager.count_scope(self, True)
            self._shown.append((mirror.bindings, mirror.mark))
            mirror.show(bindings, mark)
            # As an argument of `extend`: no interrupt comes between setting a variable and keeping the token.
            self._tokens.extend(map(self._manager.mark.set, (mark,)))
            self._tokens.extend(map(self._manager.current.set, (bindings,)))
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._leave()
        except BaseException:
            self._leave()
            raise

    def __del__(self) -> None:
        # Nobody can leave it any more. An outer scope that has ended since has put back what was before both.
        if getattr(self, "_thread", 0):
            if self._manager.mark.get() is not self._mark:
                self._tokens.clear()
            if self._manager.mirror.mark is not self._mark:
                self._shown.clear()
            with suppress(ValueError):  # the context is another one
                self._leave()

    def _leave(self) -> None:
        elsewhere: ValueError | None = None
        for token in self._tokens:
            try:
                token.var.reset(token)
            except RuntimeError:
                pass  # used, by the attempt that was interrupted
            except ValueError as error:  # set in another context, which keeps its scope
                elsewhere = error
        for shown in self._shown if self._thread == get_ident() else ():
            self._manager.mirror.bindings, self._manager.mirror.mark = shown
        self._manager.count_scope(self, False)
        self._shown.clear()
        self._tokens.clear()
        self._thread = 0
        if elsewhere is not None:
            raise elsewhere
