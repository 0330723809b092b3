# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Makes the CPU an x1, before te_dispatch probes it."""

from __future__ import annotations

import importlib.metadata
import os

import pytest
import torch

os.environ["ACME_DEVICE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    installed = {entry_point.name for entry_point in importlib.metadata.entry_points(group="te_dispatch.backends")}
    # The reference is what results are compared with.
    missing = sorted({"acme", "reference"} - installed)
    if missing:
        raise pytest.UsageError(f"install first: {', '.join(f'te-dispatch-{name}' for name in missing)}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)
