# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which copies a product reads is resolved once for all layers of a recipe, and again where that could change."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core import scopes

from .capturing import RECIPES, made, step

CPU = torch.device("cpu")
GEMM = sys.modules["te_dispatch.ops.gemm"]  # the name in its package is the operator


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layouts of the products that were resolved."""
    seen: list[str] = []
    plain = GEMM.resolve

    def resolve(operator, call, *rest):
        seen.append(call["layout"])
        return plain(operator, call, *rest)

    monkeypatch.setattr(GEMM, "resolve", resolve)
    for bindings in scopes.MANAGER.tokens.values():
        monkeypatch.setattr(bindings, "operand_formats", {})
    return seen


def test_a_second_layer_resolves_nothing(resolved: list[str]) -> None:
    with te_dispatch.using(gemm="torch"):
        step(made("Linear"), RECIPES["delayed"], 0)
        assert sorted(resolved) == ["NN", "NT", "TN"]
        step(made("LayerNormLinear"), RECIPES["delayed"], 0)
        step(made("Linear"), RECIPES["current"], 0)
        assert len(resolved) == 3
        step(made("Linear"), RECIPES["mxfp8"], 0)
        assert len(resolved) == 6


def test_another_policy_or_registry_resolves_again(resolved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CPU, "e4m3fn", "tensor", "e4m3fn", "tensor", "NT"
    with te_dispatch.using(gemm="torch"):
        first = ops.gemm_operand_format(*asked)
        assert ops.gemm_operand_format(*asked) is first and len(resolved) == 1
        manager = scopes.capture().manager
        monkeypatch.setattr(manager, "_snapshot", dataclasses.replace(manager.snapshot))
        assert ops.gemm_operand_format(*asked) == first and len(resolved) == 2
    with te_dispatch.using(gemm="reference"):
        ops.gemm_operand_format(*asked)
    assert len(resolved) == 3
