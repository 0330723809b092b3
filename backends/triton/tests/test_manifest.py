# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest keeps the contract: light, with real facts, targets and signatures; and offers every operator."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import subprocess
import sys
from typing import Any

import pytest

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.requirements import DEVICE_PREFIX
from te_dispatch_triton import MANIFEST
from te_dispatch_triton.archs import ARCHS
from te_dispatch_triton.implementations.entry import SERVED

IMPLEMENTATIONS = MANIFEST.implementations


def test_importing_it_loads_neither_torch_nor_triton() -> None:
    code = "import sys, te_dispatch_triton; sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_unique() -> None:
    names = [i.name for i in IMPLEMENTATIONS]
    assert len(names) == len(set(names))


def test_every_operator_has_an_implementation() -> None:
    assert {i.operator for i in IMPLEMENTATIONS} == set(OPERATORS)


def test_every_entry_asks_for_a_chip_and_a_triton_that_serves_it() -> None:
    assert not [i.name for i in IMPLEMENTATIONS if i.requires[: len(SERVED)] != SERVED]


@pytest.mark.compiles
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.operator}-{i.name}")
def test_signature_and_facts(implementation: Any) -> None:
    declared = OPERATORS[implementation.operator]
    assert implementation.operator_version == declared.version
    module, _, attribute = implementation.target.partition(":")
    mine = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    theirs = declared.signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
    read = {fact for condition in implementation.requires for fact in condition.reads()}
    known = set(declared.facts)
    if declared.backward:
        known |= set(OPERATORS[declared.companion].facts)
    assert not {f for f in read if not f.startswith(DEVICE_PREFIX)} - known


@pytest.mark.compiles
@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i.plan], ids=lambda i: i.name)
def test_plans_take_the_arguments_of_the_operator(implementation: Any) -> None:
    module, _, path = implementation.plan.partition(":")
    plan = operator.attrgetter(path)(importlib.import_module(module))
    names = list(OPERATORS[implementation.operator].signature.parameters)
    inspect.signature(plan).bind((), **dict.fromkeys(names))
    replays = getattr(plan, "__self__", None)
    assert replays is None or list(replays.kinds) == names


@pytest.mark.parametrize("vendor", list(ARCHS))
def test_every_chip_is_served(vendor: str) -> None:
    for chip, arch in ARCHS[vendor].items():
        facts = DeviceFacts("cuda", vendor, chip, chip, 0, arch, {"triton.ready": True})
        assert all(condition.check({}, facts).holds for condition in SERVED), chip


@pytest.mark.parametrize(
    "facts",
    [
        DeviceFacts("cuda", "nvidia", "sm_75", "T4", 0, None, {"triton.ready": True}),
        DeviceFacts("cuda", "nvidia", "sm_90", "H200", 0, ARCHS["nvidia"]["sm_90"], {"triton.ready": False}),
        DeviceFacts("xpu", "intel", "xe2", "B60", 0, None, {"triton.ready": True}),
    ],
    ids=lambda facts: facts.name,
)
def test_what_is_not_served_hears_why(facts: DeviceFacts) -> None:
    failed = [found for condition in SERVED if not (found := condition.check({}, facts)).holds]
    assert failed and all(found.reason for found in failed)


def test_another_vendor_s_device_of_type_cpu_is_not_served() -> None:
    """Its probe says nothing of Triton, and what is unknown is assumed to suit."""
    facts = DeviceFacts("cpu", "acme", "x1", "Acme x1", 0)
    failed = [found.reason for condition in SERVED if not (found := condition.check({}, facts)).holds]
    assert any("device.vendor is acme" in reason for reason in failed)
