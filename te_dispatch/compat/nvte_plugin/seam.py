# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The module that takes the place of ``transformer_engine_torch``, and the count of its calls.

It holds every attribute of the native module, with the functions that are served here in place of the native ones. A
served function calls its adapter; where that raises `PassOn`, it calls the native function and counts that, with the
reason. Any other exception, `NoImplementation` above all, reaches the caller: a policy that lets nothing serve a call
is not overruled.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from te_dispatch.compat.nvte_plugin.manifest import SERVED
from te_dispatch.compat.nvte_plugin.passing import PassOn

_log = logging.getLogger("te_dispatch")


@dataclass(frozen=True)
class Seam:
    """What a replacement is made of.

    Attributes:
        native: the module that it replaces.
        functions: name -> function, of those that are served here.
        served: function -> calls that its adapter served. Threads that call at the same moment may be counted once.
        passed_on: (function, reason) -> calls that the native function served.
    """

    native: ModuleType
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    passed_on: Counter[tuple[str, str]] = field(default_factory=Counter)

    def calls(self) -> dict[str, dict[str, Any]]:
        """Function -> its calls so far: how many were ``served``, and how many ``passed_on`` for which reason."""
        found: dict[str, dict[str, Any]] = {}
        for name, count in sorted(self.served.items()):
            found[name] = {"served": count, "passed_on": {}}
        for (name, reason), count in sorted(self.passed_on.items()):
            found.setdefault(name, {"served": 0, "passed_on": {}})["passed_on"][reason] = count
        return found


class Replacement(ModuleType):
    """Stands in ``sys.modules`` for the native module; a class of its own, so that nothing else is taken for it.

    Its attributes are the native module's and `seam`, under a name that cannot hide one of them.
    """

    def __init__(self, native: ModuleType) -> None:
        super().__init__(native.__name__, native.__doc__)
        seam = Seam(native)
        for name, adapter in adapters().items():
            seam.functions[name] = _function(seam, name, adapter)
        # The attributes of the import system too: find_spec() of a loaded module reads __spec__.
        vars(self).update(vars(native))
        vars(self).update(seam.functions)
        # `from transformer_engine_torch import *`, which Transformer Engine does.
        self.__all__ = [name for name in vars(self) if not name.startswith("_")]
        self.__te_dispatch__ = seam


def seam_of(module: Any) -> Seam | None:
    """The seam of a replacement, None for any other module."""
    return module.__te_dispatch__ if isinstance(module, Replacement) else None


def adapters() -> dict[str, Callable[..., Any]]:
    """The adapters of all families: name -> function. Imports PyTorch.

    Raises:
        RuntimeError: they are not those that the manifest says are served.
    """
    found: dict[str, Callable[..., Any]] = {}
    for family in sorted({entry.family for entry in SERVED.values()}):
        found |= importlib.import_module(f"{__package__}.{family}").ADAPTERS
    if found.keys() != SERVED.keys():
        raise RuntimeError(f"manifest and adapters differ: {', '.join(sorted(found.keys() ^ SERVED.keys()))}")
    return found


def _function(seam: Seam, name: str, adapter: Callable[..., Any]) -> Callable[..., Any]:
    native, served, passed_on = getattr(seam.native, name), seam.served, seam.passed_on

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = adapter(*args, **kwargs)
        except PassOn as why:
            reason = str(why)
        else:
            served[name] += 1
            return result
        # Outside the handler: what the native function raises is not raised "during the handling of" a PassOn.
        if not passed_on[name, reason]:
            _log.info("%s goes to the native function of Transformer Engine: %s", name, reason)
        passed_on[name, reason] += 1
        return native(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{name} of Transformer Engine, served by te_dispatch.ops.{SERVED[name].operator}."
    return call
