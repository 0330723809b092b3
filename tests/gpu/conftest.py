# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tests of this folder need an NVIDIA GPU with FP8 matrix units; elsewhere they are skipped, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif torch.cuda.get_device_capability() < (8, 9):
        reason = "no FP8 matrix units before sm_89"
    for item in items:
        if _HERE not in item.path.parents:
            continue  # pytest hands every conftest all the items of a run
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
