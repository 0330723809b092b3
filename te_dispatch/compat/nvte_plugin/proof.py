# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether the functions that Transformer Engine uses are those of this project: by identity, after its import.

Its modules reach a native function through the module, imported under a name of theirs, or hold the function itself,
under its name or in a table. All three are looked at.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from te_dispatch.compat.nvte_plugin.manifest import MODULE
from te_dispatch.compat.nvte_plugin.seam import Seam, seam_of

_PACKAGE = "transformer_engine"


def loaded() -> Seam:
    """What the module in the place of the native one is made of.

    Raises:
        RuntimeError: the native one is there, or none.
    """
    module = sys.modules.get(MODULE)
    seam = seam_of(module)
    if seam is None:
        what = "is not imported" if module is None else f"is {getattr(module, '__file__', module)}, not te_dispatch's"
        raise RuntimeError(f"the functions of te_dispatch are not in use: {MODULE} {what}")
    return seam


def _held() -> Iterator[tuple[str, str, Any]]:
    """(module, name, value) of everything that Transformer Engine's modules hold, one level of tables included."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != _PACKAGE or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if name == "__builtins__":
                continue
            yield module_name, name, value
            if isinstance(value, dict):
                for key, item in list(value.items()):
                    yield module_name, f"{name}[{key!r}]", item


def bypassing(seam: Seam) -> list[str]:
    """What in Transformer Engine reaches native functions past the replacement, in words."""
    natives = {id(getattr(seam.native, name)): name for name in seam.functions}
    found = []
    for where, name, value in _held():
        if value is seam.native:
            found.append(f"{where} holds the native module as {name}")
        elif id(value) in natives:
            found.append(f"{where} holds the native {natives[id(value)]} as {name}")
    return found


def prove() -> dict[str, Any]:
    """As `te_dispatch.compat.nvte_plugin.verify`."""
    seam = loaded()
    module = sys.modules[MODULE]
    wrong = [
        f"{MODULE}.{name} is another function"
        for name, function in seam.functions.items()
        if getattr(module, name, None) is not function
    ]
    wrong += bypassing(seam)
    if wrong:
        raise RuntimeError(f"functions of Transformer Engine's own are in use: {'; '.join(wrong)}")
    holders: dict[str, set[str]] = {name: set() for name in seam.functions}
    names = {id(function): name for name, function in seam.functions.items()}
    whole = set()
    for where, _, value in _held():
        if value is module:
            whole.add(where)
        elif id(value) in names:
            holders[names[id(value)]].add(where)
    if not whole:
        raise RuntimeError("Transformer Engine is not imported: none of its modules holds the functions")
    return {"modules": sorted(whole), "functions": {name: sorted(held) for name, held in holders.items()}}


def rows() -> list[tuple[str, str, str]]:
    """(subject, state, reason) for ``te-dispatch doctor``, which runs this in a process of its own.

    Imports Transformer Engine as a program does, and looks.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
    try:
        proven = prove()
    except RuntimeError as error:
        said = [str(warning.message) for warning in heard if str(warning.message).startswith("NVTE_PLUGIN")]
        return [(MODULE, "warning", "; ".join([str(error), *said]))]
    found = [(MODULE, "ok", f"te_dispatch's, in {len(proven['modules'])} modules of Transformer Engine")]
    for name, held in proven["functions"].items():
        found.append((name, "ok", f"te_dispatch's{', also held by ' + ', '.join(held) if held else ''}"))
    return found
