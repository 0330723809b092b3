# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The host library, and AMD's headers and libraries to compare it with. What is not there skips tests, with its
reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
BACKEND = HERE.parent.parent
#: Variables that choose what the host library answers.
CHOICES = ("HOST_HIP_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _module(path: Path) -> ModuleType:
    """The module in a file that belongs to no package, loaded once."""
    name = f"te_dispatch_rocm_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """build.py, where a compiler is."""
    module = _module(HERE / "build.py")
    try:
        module.compiler()
    except module.Unavailable as reason:
        pytest.skip(f"skipped: unavailable: {reason}")
    return module


@pytest.fixture(scope="session")
def folder(builder: ModuleType) -> Path:
    """The folder with the host library."""
    return builder.build()


@pytest.fixture
def lt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """library.py's names, and `library`, the host library in this process, for a device of gfx942."""
    for name in (*CHOICES, "HOST_HIPBLASLT_REFUSE", "HOST_HIPBLASLT_FAIL", "HOST_HIPBLASLT_LOG"):
        monkeypatch.delenv(name, raising=False)
    module = _module(HERE / "library.py")
    return SimpleNamespace(
        library=module.Library(folder / "libamdhip64.so.7", folder / "libhipblaslt.so.1"), **vars(module)
    )


@pytest.fixture(scope="session")
def packages() -> ModuleType:
    """amd_packages.py."""
    return _module(BACKEND / "tools" / "amd_packages.py")


def _fetched(packages: ModuleType, kind: str) -> Path:
    try:
        return packages.found(kind)
    except packages.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def headers(packages: ModuleType) -> Path:
    """The folder with AMD's headers."""
    return packages.include(_fetched(packages, "headers"))


@pytest.fixture(scope="session")
def real(packages: ModuleType) -> Path:
    """The folder that AMD's libraries were unpacked in."""
    return _fetched(packages, "libraries")


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """run(command, **variables) runs a program with no variables of `CHOICES` but these; subprocess.run's result."""

    def go(command: list[str], **variables: str) -> Any:
        kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
        environment = {**kept, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)

    return go
