# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``import transformer_engine`` as an import of this project.

The modules of `face.FACE` hold no code: a name is looked up where this project defines it, when it is asked for. What
is not in the table raises ModuleNotFoundError, ImportError or AttributeError, as a missing name does, so that
frameworks that try an import and go on without it do so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from te_dispatch.compat.face import ABSENT, FACE, ROOT, VERSION, submodules
from te_dispatch.compat.instead import INSTEAD

_log = logging.getLogger("te_dispatch")

#: The folder with the modules `transformer_engine` and `transformer_engine_torch`, and the metadata that tells the
#: version.
IMPORT_PATH = Path(__file__).parent / "import_path"

#: The distribution that installs what is in that folder.
STAND_IN = "te-dispatch-transformer-engine"

#: What takes the place of a file in ``repr(module)`` and in "cannot import name ... from ...".
ORIGIN = "te_dispatch stands in for Transformer Engine and has not all of it: docs/transformer_engine.md"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds and loads the modules below `transformer_engine`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FACE or not fullname.startswith(ROOT + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin=ORIGIN, is_package=bool(submodules(fullname)))


class _Loader(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"{module.__name__} of Transformer Engine {VERSION}, served by te_dispatch."
        furnish(module.__dict__)


_FINDER = _Finder()


def furnish(namespace: dict[str, Any]) -> None:
    """Give a module the names that `FACE` lists for it; each is imported when it is first asked for."""
    module: str = namespace["__name__"]
    names, below, absent = FACE[module], submodules(module), ABSENT.get(module, frozenset())

    def attribute(name: str) -> Any:
        if name in below:
            return importlib.import_module(f"{module}.{name}")
        if name in absent:
            namespace[name] = value = _absent(f"{module}.{name}")
            return value
        if name not in names:
            about = f": {INSTEAD[name]}" if name in INSTEAD else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{about}; {ORIGIN}")
        where, _, own_name = names[name].partition(":")
        namespace[name] = value = getattr(importlib.import_module(where), own_name)
        return value

    def listing() -> list[str]:
        return sorted({*namespace, *names, *below})

    namespace.update(__getattr__=attribute, __dir__=listing, __all__=sorted(names))


def _absent(name: str) -> type:
    """A class to import, to inherit from and to test instances with, which cannot be called.

    It has a `forward`, which Automodel wraps when it first makes a linear layer.
    """

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is not there yet; {ORIGIN}")

    members = {"__init__": refuse, "forward": refuse, "__doc__": f"{name}, which is not there yet."}
    return type(name.rpartition(".")[2], (), members)


def serve() -> None:
    """Find the modules below `transformer_engine`, which is being imported."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _log.info("transformer_engine %s is te_dispatch in this process", VERSION)


def found() -> tuple[str, bool] | None:
    """Where ``import transformer_engine`` leads and whether that is this project; None where it leads nowhere.

    Nothing is imported.
    """
    module = sys.modules.get(ROOT)
    spec = importlib.util.find_spec(ROOT) if module is None else module.__spec__
    if spec is None:
        return None
    place = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), ROOT))
    return str(place), place.name == f"{ROOT}.py"


def as_transformer_engine() -> None:
    """Have every later ``import transformer_engine`` of this process import te_dispatch.

    Frameworks that import Transformer Engine by name then run on it unmodified. Call it before they are imported:
    many look only once. Calling it again does nothing. Processes that `multiprocessing` starts follow; for others
    there is ``te-dispatch run``, or the distribution te-dispatch-transformer-engine (`STAND_IN`).

    Raises:
        RuntimeError: Transformer Engine itself is installed. Nothing takes its place in silence.
    """
    there = found()
    if there is None:
        sys.path.append(str(IMPORT_PATH))
        importlib.invalidate_caches()
    elif not there[1]:
        raise RuntimeError(
            f"te_dispatch cannot stand in for Transformer Engine where that is installed ({there[0]}): uninstall "
            "transformer-engine, or use an environment without it"
        )
