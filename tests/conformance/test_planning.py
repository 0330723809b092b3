# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""From settings to units."""

from __future__ import annotations

import pytest

from te_dispatch.conformance.planning import plan
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.core import scopes


def test_single_implementations_can_be_asked_for() -> None:
    settings = Settings(backends=("torch",), operators=("gemm",), implementations=("torch.matmul",), device="cpu")
    units = plan(scopes.MANAGER, settings)
    assert {unit.implementation for unit in units} == {"torch.matmul"}
    assert {unit.case.operator for unit in units} == {"gemm"}


def test_an_unknown_implementation_is_named() -> None:
    for unknown in ("torch.matmull", "acme.matmul", "matmul"):
        with pytest.raises(UsageError, match=f"implementation: '{unknown}' is not installed"):
            plan(scopes.MANAGER, Settings(implementations=(unknown,), device="cpu"))
