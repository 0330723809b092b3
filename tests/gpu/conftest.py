# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tests of this folder need an NVIDIA GPU with FP8 matrix units; elsewhere they are skipped, by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import te_dispatch

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


@pytest.fixture(scope="module")
def torch_first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The torch backend before those that were built for the device, which tests of it would otherwise be about."""
    file = tmp_path_factory.mktemp("policy") / "torch-first.yaml"
    file.write_text("version: 1\nprefer: [torch]\n")
    te_dispatch.set_policy(file)
    yield
    te_dispatch.set_policy(None)


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """``room(gib)`` skips the test where less device memory is free. What it took goes back to the device afterwards:
    PyTorch would keep it from the processes beside this one."""

    def needed(gib: int) -> None:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gib << 30:
            pytest.skip(f"needs {gib} GiB of free device memory")

    yield needed
    gc.collect()
    torch.cuda.empty_cache()
