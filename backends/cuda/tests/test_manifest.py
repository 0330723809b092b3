# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest keeps the contract: light, with real facts, targets and signatures, and honest claims."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.bind import import_target
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.requirements import DEVICE_PREFIX
from te_dispatch_cuda import MANIFEST
from te_dispatch_cuda.archs import ARCHS
from te_dispatch_cuda.implementations.native import NVIDIA

IMPLEMENTATIONS = MANIFEST.implementations


def test_importing_it_loads_neither_torch_nor_the_module() -> None:
    code = "import sys, te_dispatch_cuda; sys.exit(bool({'torch', 'te_dispatch_cuda._native'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_unique() -> None:
    names = [i.name for i in IMPLEMENTATIONS]
    assert len(names) == len(set(names))


def test_every_entry_asks_for_nvidia_and_for_a_build_that_serves_the_chip() -> None:
    assert not [i.name for i in IMPLEMENTATIONS if i.requires[: len(NVIDIA)] != NVIDIA]


@pytest.fixture
def library(native: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cuBLASLt that is never called: the modules that need one import, and are forgotten afterwards."""
    from te_dispatch_cuda import libraries

    if isinstance(libraries.cublaslt(), str):
        before = set(sys.modules)
        planted = libraries.Library("planted", "planted", (13, 0, 0))
        monkeypatch.setattr(libraries, "cublaslt", lambda: planted)
        monkeypatch.setattr(native, "open_cublaslt", lambda path: None)
        yield
        # Only those: of modules that others hold on to there would be two.
        for name in set(sys.modules) - before:
            if name.startswith("te_dispatch_cuda.gemm"):
                del sys.modules[name]
    else:
        yield


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.operator}-{i.name}")
def test_signature_and_facts(implementation: Any, library: None) -> None:
    operator = OPERATORS[implementation.operator]
    assert implementation.operator_version == operator.version
    module, _, attribute = implementation.target.partition(":")
    mine = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    theirs = operator.signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
    for name in (implementation.plan, implementation.operand_format):
        assert name is None or callable(import_target(name))
    read = {fact for condition in implementation.requires for fact in condition.reads()}
    known = set(operator.facts)
    if operator.backward:
        known |= set(OPERATORS[operator.companion].facts)
    assert not {f for f in read if not f.startswith(DEVICE_PREFIX)} - known


def test_every_chip_is_known_by_its_name() -> None:
    for chip, arch in ARCHS["nvidia"].items():
        facts = DeviceFacts("cuda", "nvidia", chip, chip, 0, arch, {"cuda.built": True})
        assert all(condition.check({}, facts).holds for condition in NVIDIA)
