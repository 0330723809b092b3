# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What may not happen while a plugin is imported: that it changes what others get, or that a lock is held.

A manifest is data, and its module is imported in every process. One that sets a policy, declares operators or asks
the registry for something while it is imported would decide for the whole process before the registry exists.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from te_dispatch.core.errors import DispatchError
from te_dispatch.core.operator import OPERATORS

_PREFIXES = ("TE_DISPATCH_", "NVTE_")
_state = threading.local()


class Tampering(DispatchError):
    """A manifest's module changed something of the process while it was imported. The change is undone."""


@contextmanager
def importing_manifest(name: str) -> Iterator[None]:
    """Import a plugin's manifest in the block; the operators and this project's variables end as they began.

    Raises:
        Tampering: the block changed them.
    """
    operators, variables = dict(OPERATORS), _variables()
    previous = getattr(_state, "manifest", None)
    _state.manifest = name
    try:
        yield
    finally:
        _state.manifest = previous
        changed = _undo(operators, variables)
    if changed:
        raise Tampering(f"changed {changed} while it was imported, which was undone; a manifest is data")


def refuse_while_importing(what: str) -> None:
    """Refuse what a manifest's module must not do.

    Raises:
        Tampering: a manifest is being imported in this thread.
    """
    name = getattr(_state, "manifest", None)
    if name is not None:
        raise Tampering(f"{what} is refused while the manifest of backend {name!r} is imported; a manifest is data")


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _undo(operators: dict[str, Any], variables: dict[str, str]) -> str:
    """Restore what differs; says what did."""
    changed = []
    if operators != OPERATORS:
        names = sorted(k for k in {*OPERATORS, *operators} if OPERATORS.get(k) is not operators.get(k))
        changed.append(f"the operators {', '.join(names)}")
        OPERATORS.clear()
        OPERATORS.update(operators)
    now = _variables()
    differing = sorted(k for k in {*now, *variables} if now.get(k) != variables.get(k))
    for name in differing:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    if differing:
        changed.append(f"the environment variables {', '.join(differing)}")
    return " and ".join(changed)


@contextmanager
def released(lock: Any) -> Iterator[None]:
    """Let go of an ``RLock``, however often this thread has taken it, for a block; no effect if it has not.

    Python's import machinery has locks of its own, and a plugin's module may call operators while it is imported:
    whoever imports with the registry's lock held waits for a thread that waits for that lock.
    """
    # What `threading.Condition` does to wait.
    if not lock._is_owned():
        yield
        return
    state = lock._release_save()
    try:
        yield
    finally:
        lock._acquire_restore(state)
