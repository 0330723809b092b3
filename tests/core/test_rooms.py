# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which room of te_dispatch may import which, and that modules of a room do not import each other.

Read from the source, so imports inside functions count too, and so do strings that name a module
(``"te_dispatch.pytorch.compile.proxies:call"``). A room is a folder or a module directly under ``te_dispatch/``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import te_dispatch

PACKAGE = Path(te_dispatch.__file__).parent
LAYOUT = PACKAGE.parent / "docs" / "architecture.md"

#: Room -> the rooms that it may import. ``te_dispatch`` is ``te_dispatch/__init__.py``; rooms below import no more than
#: the version from it. The layout's table in docs/architecture.md says the same.
ROOMS: dict[str, set[str]] = {
    "te_dispatch": {"compat", "conformance", "core", "ops", "pytorch"},
    "torch_private": set(),
    "numerics": set(),
    "core": {"te_dispatch", "torch_private"},
    "ops": {"core", "numerics", "torch_private"},
    "common": {"core"},
    "backend_kit": {"core", "numerics", "ops", "torch_private"},
    "conformance": {"te_dispatch", "core", "numerics", "ops", "torch_private"},
    "pytorch": {"common", "core", "numerics", "ops", "torch_private"},
    "compat": {"core", "numerics", "ops", "pytorch"},
    "cli": {"te_dispatch", "common", "compat", "conformance", "core", "numerics", "ops", "pytorch", "torch_private"},
}

#: (module, module named in a string) -> what the string is for, where nothing is imported by it.
NAMED: dict[tuple[str, str], str] = {
    ("te_dispatch.core.codegen", "te_dispatch.ops"): "where users find an operator, as the function's ``__module__``",
    ("te_dispatch.core.nvte_variables", "te_dispatch.compat.nvte_plugin"): "a value of the variable NVTE_PLUGIN",
}

#: (importing module, imported module) -> why the cycle that this import closes remains. Each is inside a function.
CYCLES: dict[tuple[str, str], str] = {
    ("te_dispatch.conformance.space", "te_dispatch.conformance.families"): (
        "the spaces register themselves when they are first asked for; their modules use `find` of other families"
    ),
    ("te_dispatch.pytorch.tensor.quantized_tensor", "te_dispatch.pytorch.tensor.aten"): (
        "PyTorch asks the class what its operations do; the table of these operations makes instances of the class"
    ),
    ("te_dispatch.pytorch.tensor.attributes", "te_dispatch.pytorch.tensor.aten"): (
        "methods of the class: the one that copies into it is that of the table"
    ),
    ("te_dispatch.pytorch.tensor.attributes", "te_dispatch.pytorch.tensor.quantized_tensor"): (
        "methods of the class that make instances of it"
    ),
    ("te_dispatch.pytorch.tensor.attributes", "te_dispatch.pytorch.tensor.quantizers"): (
        "a quantized tensor is asked for its quantizer, which makes quantized tensors"
    ),
}


class Import(NamedTuple):
    """One module's mention of another: ``how`` is ``module`` (at import), ``function``, ``typing`` or ``string``."""

    source: str
    target: str
    line: int
    how: str


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def room(module: str) -> str:
    return (module.split(".") + ["te_dispatch"])[1] if module.count(".") else "te_dispatch"


def _known(name: str) -> str | None:
    """The module that a dotted name lies in, or is."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def _names(node: ast.AST) -> list[str]:
    """The dotted names that a node imports or, if it is a string that names a module or an attribute of one, names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute in this project"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.partition(":")[0]
        if name.startswith("te_dispatch.") and (
            name in MODULES or name.rpartition(".")[0] in set(MODULES) - {"te_dispatch"}
        ):
            return [name]
    return []


def _walk(source: str, node: ast.AST, how: str = "module") -> Iterator[Import]:
    for name in _names(node):
        target = _known(name)
        if target is not None and target != source:
            yield Import(source, target, node.lineno, "string" if isinstance(node, ast.Constant) else how)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        how = "function"
    for child in ast.iter_child_nodes(node):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
        yield from _walk(source, child, "typing" if guarded else how)


IMPORTS = [
    found for module, path in MODULES.items() for found in _walk(module, ast.parse(path.read_text(encoding="utf-8")))
]


def test_the_reader_finds_imports_of_every_kind() -> None:
    found = {
        (one.source.removeprefix("te_dispatch."), one.target.removeprefix("te_dispatch."), one.how) for one in IMPORTS
    }
    assert ("ops.gemm", "core.operator", "module") in found
    assert ("core.manager", "core.discovery", "function") in found
    assert ("core.bindings", "core.manager", "typing") in found
    assert ("te_dispatch", "pytorch.compile.proxies", "string") in found


def test_every_room_is_in_the_table() -> None:
    assert {room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_the_rooms_that_it_may(name: str) -> None:
    wrong = [
        f"{one.source}, line {one.line}: {one.target} ({one.how})"
        for one in IMPORTS
        if room(one.source) == name != room(one.target)
        and room(one.target) not in ROOMS[name]
        and (one.source, one.target) not in NAMED
    ]
    assert wrong == []


def test_rooms_below_import_no_more_than_the_version_from_the_package_itself() -> None:
    names = {
        alias.name
        for module, path in MODULES.items()
        if room(module) == "core"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "te_dispatch"
        for alias in node.names
        if f"te_dispatch.{alias.name}" not in MODULES
    }
    assert names == {"__version__"}


def test_the_rooms_have_an_order() -> None:
    below = {name: others - {"te_dispatch"} for name, others in ROOMS.items() if name != "te_dispatch"}
    assert _cycles(below) == []


def test_the_documentation_s_table_is_this_one() -> None:
    section = LAYOUT.read_text(encoding="utf-8").split("## Layout", 1)[1].split("\n## ", 1)[0]
    told = {}
    for row in re.findall(r"^\| `te_dispatch/.*$", section, re.MULTILINE):
        place, _, rooms = (cell.strip() for cell in row.strip("|").split(" | ")[:3])
        name = re.match(r"`te_dispatch/(\w+)", place)
        assert name is not None, row
        told["te_dispatch" if name[1] == "__init__" else name[1]] = set(re.findall(r"`(\w+)`", rooms))
    assert told.pop("policies") == set()  # data
    assert told == ROOMS


# -- cycles inside a room -----------------------------------------------------------------------------------------


def _cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of two nodes and more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def _imported(name: str, without: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Module of a room -> the modules of that room which it imports, in functions too. Annotations import nothing.

    That a module's package is imported before it is left out: a package's ``__init__`` may import its modules.
    """
    graph: dict[str, set[str]] = {module: set() for module in MODULES if room(module) == name}
    for one in IMPORTS:
        inside = one.source in graph and one.target in graph
        if inside and one.how in ("module", "function") and (one.source, one.target) not in without:
            graph[one.source].add(one.target)
    return graph


def test_cycles_are_found() -> None:
    assert _cycles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [["b", "c"]]


@pytest.mark.parametrize("name", ROOMS)
def test_modules_of_a_room_do_not_import_each_other(name: str) -> None:
    assert _cycles(_imported(name, CYCLES)) == []


@pytest.mark.parametrize("edge", CYCLES, ids=lambda edge: edge[0])
def test_a_listed_cycle_exists(edge: tuple[str, str]) -> None:
    assert {one.how for one in IMPORTS if (one.source, one.target) == edge} - {"typing"} == {"function"}
    assert any(set(edge) <= set(cycle) for cycle in _cycles(_imported(room(edge[0]), set(CYCLES) - {edge})))


# -- folders of te_dispatch.pytorch ---------------------------------------------------------------------------------


def _places() -> dict[str, int]:
    """Folder or module of te_dispatch/pytorch -> the row of the documentation's table that it stands in."""
    table = LAYOUT.read_text(encoding="utf-8").split("| in `te_dispatch/pytorch/` | what it holds |\n|---|---|\n", 1)[1]
    rows = [line.split(" | ")[0] for line in table.split("\n\n", 1)[0].split("\n")]
    return {name: row for row, cell in enumerate(rows) for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}


def _folder(module: str) -> str:
    return module.split(".")[2]


def test_every_folder_of_pytorch_is_in_the_table() -> None:
    inside = {_folder(module) for module in MODULES if module.startswith("te_dispatch.pytorch.")}
    assert inside == set(_places())


def test_folders_of_pytorch_import_those_above_them_in_the_table() -> None:
    places = _places()
    wrong = [
        f"{one.source}, line {one.line}: {one.target}"
        for one in IMPORTS
        if one.source.startswith("te_dispatch.pytorch.")
        and one.target.startswith("te_dispatch.pytorch.")
        and one.how in ("module", "function")
        and _folder(one.source) != _folder(one.target)
        and places[_folder(one.target)] > places[_folder(one.source)]
    ]
    assert wrong == []


# -- the operators are there ----------------------------------------------------------------------------------------


def _loaded_with(module: str) -> set[str]:
    """Every module that is imported with this one or by its functions, and the packages that they lie in."""
    at_import: dict[str, set[str]] = {}
    for one in IMPORTS:
        if one.how == "module":
            at_import.setdefault(one.source, set()).add(one.target)
    found: set[str] = set()
    todo = [module, *(one.target for one in IMPORTS if one.source == module and one.how == "function")]
    while todo:
        name = todo.pop()
        while name and name not in found:
            found.add(name)
            todo += at_import.get(name, ())
            name = name.rpartition(".")[0]
    return found


_NEEDING = sorted(
    {
        one.source
        for one in IMPORTS
        if one.target in ("te_dispatch.core.scopes", "te_dispatch.core.plan")
        and one.how in ("module", "function")
        and room(one.source) not in ("core", "te_dispatch")
    }
)


@pytest.mark.parametrize("module", _NEEDING)
def test_who_uses_the_process_s_manager_declares_its_operators(module: str) -> None:
    """The manager has the operators that `te_dispatch.ops` adds to it, and does not import that room itself."""
    assert "te_dispatch.ops" in _loaded_with(module)


# -- what a package says of itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_a_package_says_what_it_may_import_and_where_to_start(package: str) -> None:
    told = ast.get_docstring(ast.parse(MODULES[package].read_text(encoding="utf-8"))) or ""
    told = " ".join(told.split())
    assert re.search(r"\b[Mm]ay import\b", told) and re.search(r"\bStart (reading )?(at|with)\b", told), told
