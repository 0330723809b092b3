# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Makes the tests' shared module importable, and their inputs the same in every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)
