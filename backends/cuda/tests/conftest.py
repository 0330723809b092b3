# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module and its build. Without them tests are skipped, but never in CI, which builds them first."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BACKEND = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """script(path) loads a program of this backend that belongs to no package."""
    return _script


def _script(path: str) -> ModuleType:
    file = BACKEND / path
    spec = importlib.util.spec_from_file_location(f"te_dispatch_cuda_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _absent(reason: str) -> Any:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def native() -> Any:
    """The compiled module."""
    from te_dispatch_cuda.native import load

    try:
        return load()
    except ImportError as error:
        _absent(str(error))


@pytest.fixture(scope="session")
def resources() -> Any:
    return _script("tools/resources.py")


@pytest.fixture(scope="session")
def build(resources: Any) -> Path:
    """The folder in which this interpreter's module was built."""
    found = resources.build_folder()
    return found if found is not None else _absent("backends/cuda was not built from this checkout: make cuda")
