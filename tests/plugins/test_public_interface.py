# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Backends that live in this repository have no privilege: they import what any vendor's plugin may, and the core
knows nothing of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .workshop import REPOSITORY

GUIDE = REPOSITORY / "docs" / "writing_a_backend.md"
CORE = REPOSITORY / "te_dispatch"

#: Every package that is a backend.
BACKENDS = [*sorted(REPOSITORY.glob("backends/*/te_dispatch_*")), *sorted(REPOSITORY.glob("examples/*/te_dispatch_*"))]


def public_modules() -> set[str]:
    """The modules that the guide lists as what a backend may import."""
    section = GUIDE.read_text(encoding="utf-8").split("## What a backend may import", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `(te_dispatch\.[a-z_.]+)` \|", section, re.MULTILINE))


def _imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module or "", alias.name) for alias in node.names)


def _is_module(name: str) -> bool:
    place = REPOSITORY / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


def _trespasses(package: Path, allowed: set[str]) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        for module, name in _imports(path):
            if module.partition(".")[0] != "te_dispatch":
                continue
            whole = f"{module}.{name}"
            used = whole if name is not None and _is_module(whole) else module
            if used not in allowed or (name or "").startswith("_"):
                found.append(f"{path.relative_to(package.parent)}: {whole if name else module}")
    return found


def test_the_guide_lists_modules_that_exist() -> None:
    listed = public_modules()
    assert "te_dispatch.core.manifest" in listed
    assert [name for name in sorted(listed) if not _is_module(name)] == []


def test_the_backends_are_found() -> None:
    assert {"te_dispatch_reference", "te_dispatch_torch", "te_dispatch_acme"} <= {package.name for package in BACKENDS}


@pytest.mark.parametrize("package", BACKENDS, ids=lambda package: package.name)
def test_backends_import_public_modules_only(package: Path) -> None:
    assert _trespasses(package, public_modules()) == []


def test_a_private_import_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "te_dispatch_sly"
    package.mkdir()
    (package / "sly.py").write_text(
        "from te_dispatch.core.manager import OpManager\n"
        "from te_dispatch.ops import alloc\n"
        "from te_dispatch.ops.gemm import _gemm_shape\n"
        "def late():\n    from te_dispatch.core import scopes\n"
    )
    assert _trespasses(package, public_modules()) == [
        "te_dispatch_sly/sly.py: te_dispatch.core.manager.OpManager",
        "te_dispatch_sly/sly.py: te_dispatch.ops.gemm._gemm_shape",
        "te_dispatch_sly/sly.py: te_dispatch.core.scopes",
    ]


@pytest.mark.parametrize("package", BACKENDS, ids=lambda package: package.name)
def test_backends_do_not_import_each_other(package: Path) -> None:
    others = {other.name for other in BACKENDS if other.name != package.name}
    imported = {module.partition(".")[0] for path in package.rglob("*.py") for module, _ in _imports(path)}
    assert imported & others == set()


def test_the_core_imports_no_backend() -> None:
    names = "|".join(package.name for package in BACKENDS)
    # As text, so that an import by name is found too.
    mention = re.compile(rf"\b({names})\b")
    found = [str(path) for path in sorted(CORE.rglob("*.py")) if mention.search(path.read_text(encoding="utf-8"))]
    assert found == []
