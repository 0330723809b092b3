# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which names of Transformer Engine Python source uses, and what becomes of them under the alias."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

#: Framework -> what becomes of a name (`resolved`) -> dotted names. Those of releases are all that the release uses
#: (`used`; tests/integrations compares); those of commits, what the files that are named use.
RECORD: dict[str, dict[str, list[str]]] = json.loads((Path(__file__).parent / "framework_names.json").read_text())

#: The modules that Transformer Engine installs.
_ROOTS = ("transformer_engine", "transformer_engine_torch")


def used(folder: Path) -> set[str]:
    """The dotted names that the files of a folder import, and those that they read from what they imported."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in _ROOTS:
                for name in node.names:
                    known[name.asname or name.name] = f"{node.module}.{name.name}"
                    found.add(f"{node.module}.{name.name}")
            elif isinstance(node, ast.Import):
                for name in node.names:
                    root = name.name.split(".")[0]
                    if root in _ROOTS:
                        known[name.asname or root] = name.name if name.asname else root
                        found.add(name.name)
        for node in ast.walk(tree):
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            if parts and isinstance(node, ast.Name) and node.id in known:
                found.add(".".join((known[node.id], *reversed(parts))))
    return found


def resolved(name: str) -> str:
    """``there``, ``placeholder`` (raises where it is used) or ``missing`` (raises where it is imported)."""
    parts = name.split(".")
    try:
        steps: list[Any] = [importlib.import_module(parts[0])]
        for position, part in enumerate(parts[1:], 2):
            try:
                steps.append(getattr(steps[-1], part))
            except AttributeError:
                steps.append(importlib.import_module(".".join(parts[:position])))
    except ImportError as error:
        assert parts[0] in str(error), error
        return "missing"
    return "placeholder" if any("not there yet" in (step.__doc__ or "") for step in steps) else "there"
