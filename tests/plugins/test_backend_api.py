# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""docs/backend_api.md names what exists, with the parameters and defaults that it has."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest

from te_dispatch import torch_private
from te_dispatch.core.decision import Accepted
from te_dispatch.core.facts import Arch

from .test_public_interface import public_modules
from .workshop import REPOSITORY

PAGE = (REPOSITORY / "docs" / "backend_api.md").read_text(encoding="utf-8")
#: Modules that hold operators' contracts or what no plugin needs to begin with: the guide's list says what for.
_ELSEWHERE = re.compile(r"te_dispatch\.ops\.(activation|attention|gemm|norm|position|quantize|softmax|training)")


def written(value: Any) -> str:
    """A class or function as the page writes it: with its parameters and defaults."""
    if not inspect.isfunction(value) and not inspect.isclass(value):
        return ""
    try:
        parameters = inspect.signature(inspect.unwrap(value)).parameters.values()
    except ValueError:  # an exception's
        return value.__name__
    parts = []
    for p in parameters:
        default = "" if p.default is p.empty else "={}" if "factory" in repr(p.default) else f"={p.default!r}"
        default = "=()" if default == "=frozenset()" else default
        parts.append({p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name + default)
    return f"{value.__name__}({', '.join(parts)})"


def sections() -> list[tuple[str, str]]:
    """(module, text) of every section about a module."""
    texts = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    return [(heading[1], text) for text in texts if (heading := re.match(r"`(te_dispatch[\w.]*)`\n", text))]


def entries() -> list[tuple[str, str]]:
    """(module, what a row names) of every row under a module's heading."""
    return [(module, row) for module, text in sections() for row in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)]


def table(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_the_page_has_entries() -> None:
    assert len(entries()) > 100


@pytest.mark.parametrize(("module", "entry"), entries(), ids=lambda part: part.partition("(")[0])
def test_what_is_named_exists_as_written(module: str, entry: str) -> None:
    value = getattr(importlib.import_module(module), entry.partition("(")[0])
    # Names of PyTorch's are native functions in one release, and their replacements in another.
    of_pytorch = any(value is one for one in vars(torch_private).values())
    assert of_pytorch or entry == (written(value) or entry)


@pytest.mark.parametrize("example", ["acme_backend", "npu_backend"])
def test_what_the_examples_import_is_named(example: str) -> None:
    cells = [(module, re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)) for module, text in sections()]
    named = {(module, name) for module, first in cells for cell in first for name in re.findall(r"`(\w+)", cell)}
    imported = set()
    for path in (REPOSITORY / "examples" / example).rglob("te_dispatch_*/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("te_dispatch."):
                imported |= {(node.module, alias.name) for alias in node.names}
    modules = public_modules()
    missing = {(m, name) for m, name in imported - named if f"{m}.{name}" not in modules}
    assert imported and not missing


def test_modules_are_public_and_all_of_them_are_there() -> None:
    named = {module for module, _ in entries()}
    assert named <= public_modules() | {"te_dispatch"}
    rest = {name for name in public_modules() - named if not _ELSEWHERE.fullmatch(name)}
    assert rest <= set(re.findall(r"`(te_dispatch\.[\w.]+)`", PAGE)), rest


@pytest.mark.parametrize("name", ["gemm", "quantize", "rows", "attention", "training", "values"])
def test_no_check_is_missing(name: str) -> None:
    module = importlib.import_module(f"te_dispatch.ops.checks.{name}")
    public = {
        n
        for n, value in vars(module).items()
        if inspect.isfunction(inspect.unwrap(value) if callable(value) else value)
        and value.__module__ == module.__name__
        and not n.startswith("_")
    }
    assert public == {entry.partition("(")[0] for owner, entry in entries() if owner == module.__name__}


def test_the_fields_of_arch_and_of_what_an_observer_gets() -> None:
    assert table("The fields of `Arch`") == {field.name for field in dataclasses.fields(Arch)}
    assert table("Who served a call") <= {field.name for field in dataclasses.fields(Accepted)}
