# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Fixtures of the bad-input tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Equal operands in every test, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
