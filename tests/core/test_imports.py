# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What importing costs: every process of a cluster pays for it, and a command line on every call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import te_dispatch.core

pytestmark = pytest.mark.sampled(6)

_CORE = Path(te_dispatch.core.__file__).parent
MODULES = sorted(
    ".".join(("te_dispatch", "core", *path.relative_to(_CORE).with_suffix("").parts))
    for path in _CORE.rglob("*.py")
    if path.name != "__init__.py"
)
HEAVY = {"torch", "numpy", "stevedore"}
#: What reading a policy file or discovering backends needs; both happen at the first resolution.
FOR_FILES = {"yaml", "msgspec"}
READS_FILES = {f"te_dispatch.core.policy.{name}" for name in ("file", "parse", "schema")}


def modules_loaded_by(statements: str) -> set[str]:
    """Modules that a fresh interpreter holds after some statements, besides those it starts with."""
    code = f"import sys; before = set(sys.modules)\n{statements}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def loaded_by(statements: str) -> set[str]:
    """The top-level packages of these modules."""
    return {name.partition(".")[0] for name in modules_loaded_by(statements)}


def test_the_package_and_its_scopes_load_nothing_heavy() -> None:
    loaded = loaded_by("import te_dispatch\nte_dispatch.policy, te_dispatch.using, te_dispatch.ops.gemm")
    assert "te_dispatch" in loaded and not loaded & (HEAVY | FOR_FILES)


def test_opening_a_policy_file_loads_what_reads_it() -> None:
    assert loaded_by("from te_dispatch.core.policy.file import load_policy") >= FOR_FILES


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_the_first_that_is_imported(module: str) -> None:
    """Modules that import each other would work in one order only."""
    allowed = FOR_FILES if module in READS_FILES else set()
    if module == "te_dispatch.core.discovery":
        allowed = {"stevedore"}
    loaded = modules_loaded_by(f"import {module}")
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY | FOR_FILES) - allowed
    # Nor any room above, whatever the source of the imports says.
    rooms = {name.split(".")[1] for name in loaded if name.startswith("te_dispatch.")}
    assert rooms <= {"core", "_bound"}  # generated functions


def test_the_manager_without_operators_says_what_declares_them() -> None:
    loaded_by(
        "from te_dispatch.core.errors import DispatchError\n"
        "from te_dispatch.core.scopes import MANAGER\n"
        "try: MANAGER.snapshot\n"
        "except DispatchError as error: assert 'import te_dispatch.ops' in str(error), error\n"
        "else: raise AssertionError\n"
    )


def test_operators_declared_after_the_manager_was_made_are_served_in_scopes_that_are_open_then() -> None:
    loaded_by(
        "from te_dispatch.core import scopes\n"
        "early = scopes.capture()\n"
        "with scopes.reenter(early):\n"
        "    from te_dispatch import ops\n"
        "    assert scopes.capture() is early is scopes.MANAGER.bindings\n"
        "    assert callable(early.gemm) and ops.gemm is scopes.MANAGER.ops.gemm\n"
        "    assert ops.gemm.__globals__ is vars(scopes.MANAGER.namespace)\n"
        "    from te_dispatch.numerics.quantized import FakeQuantized, Quantized\n"
        "    assert ops.gemm.__globals__['_RECORDS'] == {Quantized, FakeQuantized}\n"
        "    x = __import__('torch').ones(2, 2)\n"
        "    assert ops.gemm(x, x, layout='NT').out.sum() == 8\n"
    )


@pytest.mark.parametrize("first", ["te_dispatch.core.scopes", "te_dispatch.ops", "te_dispatch.ops.gemm"])
def test_operators_are_declared_whatever_is_imported_first(first: str) -> None:
    loaded_by(
        f"import {first}\nimport te_dispatch.core.scopes\nfrom te_dispatch import ops\n"
        "assert ops.gemm is te_dispatch.core.scopes.MANAGER.ops.gemm and ops.gemm.__module__ == 'te_dispatch.ops'"
    )
