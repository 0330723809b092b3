# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every module takes Transformer Engine's arguments: names, order, kinds and defaults; and so do functions.

The fixture holds what `inspect.signature` says of Transformer Engine's classes and functions. `device` alone differs:
its default is None here (the current accelerator, or the CPU) where Transformer Engine says "cuda".
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Module

import te_dispatch.pytorch as te

_RECORDED = json.loads((Path(__file__).parent / "te_signatures.json").read_text())
FIXTURE, FUNCTIONS = _RECORDED["modules"], _RECORDED["functions"]


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
    cls = getattr(te, name)
    ours = described(cls.__init__ if part == "init" else cls.forward)
    assert ours == expected(name, part)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions(name: str) -> None:
    function = getattr(te, name)
    assert described(function, skipped=0) == FUNCTIONS[name]


def test_the_fixture_covers_what_is_shipped() -> None:
    modules = {
        name for name in te.__all__ if inspect.isclass(getattr(te, name)) and issubclass(getattr(te, name), Module)
    }
    assert set(FIXTURE) == modules - {"Sequential"}  # which is torch.nn.Sequential
    assert all("init" in parts for parts in FIXTURE.values())
