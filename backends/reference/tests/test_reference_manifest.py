# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest promises what the modules hold."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.manifest import Implementation
from te_dispatch.core.operator import OPERATORS
from te_dispatch_reference import MANIFEST, probe


@pytest.mark.parametrize("implementation", MANIFEST.implementations, ids=lambda i: i.name)
def test_signatures_are_the_operators(implementation: Implementation) -> None:
    import inspect

    module, _, attribute = implementation.target.partition(":")
    assert module == f"te_dispatch_reference.{OPERATORS[implementation.operator].family}"
    mine = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    theirs = OPERATORS[implementation.operator].signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("implementation", MANIFEST.implementations, ids=lambda i: i.name)
def test_requirements_read_facts_that_exist(implementation: Implementation) -> None:
    for condition in implementation.requires:
        assert condition.reads() <= set(OPERATORS[implementation.operator].facts)


def test_every_operator_is_served_last_and_never_captured() -> None:
    """The conformance of other backends needs an oracle for all of them."""
    assert {i.operator for i in MANIFEST.implementations} == set(OPERATORS)
    for i in MANIFEST.implementations:
        assert i.rank == 900 and "deterministic" in i.claims and not {"capturable", "no_host_sync"} & i.claims
        assert i.operator_version == OPERATORS[i.operator].version


def test_the_manifest_is_light() -> None:
    code = "import sys, te_dispatch_reference; print([m for m in ('torch', 'numpy', 'ml_dtypes') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe.probe(0)
    assert (facts["type"], facts["vendor"], facts["encodings"]) == ("cpu", "cpu", ())
    assert probe.unavailable() is None and {state for _, state, _ in probe.doctor()} == {"ok"}
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None if name == "ml_dtypes" else object())
    assert probe.unavailable() == "ml_dtypes not installed"
    assert ("ml_dtypes", "missing", "not installed: pip install ml_dtypes") in probe.doctor()
