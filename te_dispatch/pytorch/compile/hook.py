# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Give dynamo another function to trace in place of one, or its result, without importing dynamo.

`substitute` may be called long before anything is compiled. Importing torch._dynamo takes about a second, which a
program that never compiles must not pay, so substitutions wait until someone else imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"

_lock = threading.RLock()
_waiting: list[Callable[[], None]] = []
_dynamo_ready = _DYNAMO in sys.modules


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that dynamo calls while tracing, keeping the result as a constant.

    It is what ``torch.compiler.assume_constant_result`` does.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def substitute(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """From now on, dynamo traces `traced` wherever compiled code calls `function`.

    Args:
        function: a Python or builtin function, known by identity. One that has a substitute already must not be given
            another: dynamo refuses with a ValueError.
        traced: called with the same arguments; ordinary code that dynamo can inline.
    """
    when_dynamo_loads(lambda: _apply(function, traced))


def when_dynamo_loads(action: Callable[[], None]) -> None:
    """Run `action` once torch._dynamo has been imported, now if it has been."""
    with _lock:
        if not _dynamo_ready:
            _waiting.append(action)
            return
    action()


def _apply(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    import torch

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)  # type: ignore[arg-type]


def _dynamo_imported() -> None:
    global _dynamo_ready
    with _lock:
        _dynamo_ready = True
        for action in _waiting:
            action()
        _waiting.clear()


class _AfterImport(importlib.abc.Loader):
    """Run the module as its own loader does, then apply what waits."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is indistinguishable from one imported without this finder.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _DynamoFinder)]
        _dynamo_imported()


class _DynamoFinder(importlib.abc.MetaPathFinder):
    """Notices the import of torch._dynamo; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        # Stays on the path until the module runs: others may ask for the spec and not import.
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader)
        return spec


if not _dynamo_ready:
    sys.meta_path.insert(0, _DynamoFinder())
