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


def loaded_by(statements: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after some statements, besides those it starts with."""
    code = f"import sys; before = set(sys.modules)\n{statements}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


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
    assert not loaded_by(f"import {module}") & (HEAVY | FOR_FILES) - allowed
