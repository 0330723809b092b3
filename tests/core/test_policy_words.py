# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Options whose values the operators declare: a rule that names another value can never match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core import scopes
from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.requirements import OneOf


def conditions(tmp_path: Path, op: str, when: str) -> Any:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nrules:\n- op: '{op}'\n  when: {{{when}}}\n  prefer: [torch]\n")
    return load_policy(path, scopes.MANAGER.known()).rules[0].when


@pytest.mark.parametrize(
    ("op", "when", "message"),
    [
        ("gemm", "layout: XX", r"p\.yaml:4:18: when: layout: can never be 'XX'; known: NN, NT, TN"),
        ("gemm", "layout: [NT, tn]", "layout: can never be 'tn'"),
        ("attention", "layout: bhsd", "layout: can never be 'bhsd'; did you mean '[bs]+hd'"),
        ("gemm", "layout: 3", "layout: can never be 3"),
        ("gemm", "bias: yes", "bias: must be true or false, got 'yes'"),
        ("quantize", "quantizer: delayd", "quantizer: can never be 'delayd'; did you mean 'delayed'?"),
        ("quantize", "usage: rows", "usage: can never be 'rows'; did you mean 'row'?"),
        ("gemm", "bias: 1", "bias: must be true or false, got 1"),
    ],
)
def test_a_value_that_no_call_has_is_refused(tmp_path: Path, op: str, when: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        conditions(tmp_path, op, when)


@pytest.mark.parametrize(
    ("op", "when", "expected"),
    [
        ("gemm", "layout: [NT, NN]", OneOf("layout", "NT", "NN")),
        ("*", "layout: TN", OneOf("layout", "TN")),
        ("gemm", "bias: true", OneOf("bias", True)),
        ("gemm", "bias: null", OneOf("bias", False)),
    ],
)
def test_values_that_calls_have(tmp_path: Path, op: str, when: str, expected: OneOf) -> None:
    """An operand is given or not; null is the word for not."""
    assert conditions(tmp_path, op, when) == (expected,)
