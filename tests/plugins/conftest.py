# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Wheels of this repository's distributions, built once per test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .workshop import build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> wheel."""
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a folder of its own below the one they share.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return build_wheels(shared / "wheels")
