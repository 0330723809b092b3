# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""An ``operand_format`` that no product can have: named in the kit, and where modules ask for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch import ops
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.space import find as space_of
from te_dispatch.conformance.trial import Failure
from te_dispatch.core import scopes
from te_dispatch_torch import gemm as products

from .trials import case_of, trial_of

CASE = case_of("gemm", "quantized", layout="NT", scaling="current+current")


def _answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(products.emulated, "operand_format", lambda layout, operand, scaling: answer, raising=False)
    monkeypatch.setattr(scopes.MANAGER.functions, "_declared", {})  # the function before
    for bindings in scopes.MANAGER.tokens.values():  # which keep the answers of the function before
        monkeypatch.setattr(bindings, "operand_formats", {})


@pytest.mark.parametrize("answer", (("rows", "canonical"), "row", ("row",), ["row", "canonical"], None, ("row", "")))
def test_an_impossible_answer(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    _answering(monkeypatch, answer)
    trial = trial_of(CASE, "torch.emulated_gemm")
    assert find("operand_format").applies(trial.subject, trial.space) is None
    with pytest.raises(Failure, match=r"torch\.emulated_gemm: its operand_format answered"):
        find("operand_format").run(trial)
    with (
        scopes.using(gemm="torch"),
        pytest.raises(ValueError, match=r"torch\.emulated_gemm: its operand_format answered"),
    ):
        ops.gemm_operand_format(torch.device("cpu"), "e4m3fn", "tensor", "e4m3fn", "tensor", "NT")


def test_a_layout_of_scales_of_another_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, ("row", "gemm_1d"))
    with pytest.raises(Failure, match="asks for scales in layout 'gemm_1d' for NT, a, tensor, expected canonical"):
        find("operand_format").run(trial_of(CASE, "torch.emulated_gemm"))


def test_a_possible_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, ("column", "canonical"))
    find("operand_format").run(trial_of(CASE, "torch.emulated_gemm"))


def test_products_of_the_default_are_not_asked() -> None:
    trial = trial_of(CASE, "torch.emulated_gemm")
    assert "by default" in str(find("operand_format").applies(trial.subject, space_of("gemm", "quantized")))
