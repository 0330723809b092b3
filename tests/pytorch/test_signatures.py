# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every module takes Transformer Engine's arguments: names, order, kinds and defaults; and so do functions.

The fixture holds what `inspect.signature` says of Transformer Engine's classes and functions. `device` alone differs:
its default is None here (the current accelerator, or the CPU) where Transformer Engine says "cuda".
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

_RECORDED = json.loads((Path(__file__).parent / "te_signatures.json").read_text())
FIXTURE, FUNCTIONS = _RECORDED["modules"], _RECORDED["functions"]
HOMES = {
    "DotProductAttention": "attention",
    "Fp8Padding": "padding",
    "Fp8Unpadding": "padding",
    "LayerNorm": "normalization",
    "LayerNormLinear": "layernorm_linear",
    "LayerNormMLP": "layernorm_mlp",
    "Linear": "linear",
    "MultiheadAttention": "multi_head_attention",
    "RMSNorm": "normalization",
    "RotaryPositionEmbedding": "rotary",
    "TransformerLayer": "transformer_layer",
}


def described(function: Any, skipped: int = 1) -> list[list[Any]]:
    """[name, kind, default] per parameter but self, as the fixture writes them."""
    rows = []
    for parameter in list(inspect.signature(function).parameters.values())[skipped:]:
        kind = parameter.kind.name.lower()
        default = "<required>" if parameter.default is inspect.Parameter.empty else parameter.default
        rows.append([parameter.name, kind, default])
    return rows


def expected(name: str, part: str) -> list[list[Any]]:
    return [[n, kind, None if n == "device" else default] for n, kind, default in FIXTURE[name][part]]


@pytest.mark.parametrize("name, part", [(name, part) for name in FIXTURE for part in FIXTURE[name]])
def test_arguments(name: str, part: str) -> None:
    cls = getattr(importlib.import_module(f"te_dispatch.pytorch.{HOMES[name]}"), name)
    ours = described(cls.__init__ if part == "init" else cls.forward)
    assert ours == expected(name, part)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    function = getattr(importlib.import_module("te_dispatch.pytorch"), name)
    assert described(function, skipped=0) == FUNCTIONS[name]


def test_the_fixture_covers_what_is_shipped() -> None:
    assert set(FIXTURE) == set(HOMES)
    assert all("init" in parts for parts in FIXTURE.values())
