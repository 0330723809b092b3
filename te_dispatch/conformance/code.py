# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which code a run is of: versions stay the same while kernels are worked on."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from te_dispatch.core.manager import OpManager

#: Digits of a digest that are kept.
_DIGITS = 16


def digests(manager: OpManager, backends: Iterable[str]) -> dict[str, str]:
    """Top-level package -> SHA-256 of its files' names and contents: this one, and those that backends' functions are
    in. A package that cannot be found, whose functions cannot be called either, is left out."""
    packages = {"te_dispatch"}
    for backend in backends:
        for one in manager.snapshot.backends[backend].manifest.implementations:
            packages.add(one.target.partition(":")[0].partition(".")[0])
    found = {package: list(_files(package)) for package in sorted(packages)}
    return {package: _digest(files) for package, files in found.items() if files}


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Names below the package, and files, in order; not what Python makes of them."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.origin is not None and Path(spec.origin).is_file():
            yield package, Path(spec.origin)
        return
    for root in map(Path, spec.submodule_search_locations):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root)), path


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    made = hashlib.sha256()
    for name, path in files:
        made.update(f"{name}\0{path.stat().st_size}\0".encode())
        made.update(path.read_bytes())
    return made.hexdigest()[:_DIGITS]
