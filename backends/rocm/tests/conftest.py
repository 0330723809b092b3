# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module, and a HIP and hipBLASLt that compute on the host (host_library/). Without them tests are
skipped, but never in CI, which builds them first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("te_dispatch_rocm") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # it is installed where its module is built (`make rocm`)

#: The chips that the host library stands for, by HIP's index.
CHIPS = ("gfx942", "gfx950", "gfx90a", "gfx1201")


def _absent(reason: str) -> Any:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"te_dispatch_rocm_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def native() -> Any:
    """The compiled module, without any library."""
    from te_dispatch_rocm.native import load

    try:
        return load()
    except ImportError as error:
        _absent(str(error))


@pytest.fixture(scope="session")
def host_folder() -> Path:
    """The folder with libamdhip64 and libhipblaslt for the host."""
    build = _script(HERE / "host_library" / "build.py")
    try:
        found: Path = build.build()
    except build.Unavailable as reason:
        _absent(str(reason))
    return found


@pytest.fixture
def host_environment(host_folder: Path) -> Callable[..., dict[str, str]]:
    """host_environment(chips, **more) is the environment of a process that has these devices."""

    def environment(chips: str, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.endswith("VISIBLE_DEVICES")}
        host = {"HOST_HIP_DEVICES": chips, "TE_DISPATCH_ROCM_PATH": str(host_folder), "TE_DISPATCH_ROCM_MEMORY": "host"}
        return {**kept, **host, **more}

    return environment


@pytest.fixture
def run_python(host_environment: Callable[..., dict[str, str]]) -> Callable[..., str]:
    """run_python(code, chips, **environment) runs a program in a process of its own and returns what it prints."""

    def run(code: str, chips: str = "gfx942", **more: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(
            command, env=host_environment(chips, **more), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture
def modules(native: Any, host_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This backend's modules of products, on the host library with the devices `CHIPS`; ``use(chip)`` says which of
    them tensors of the CPU are on."""
    from te_dispatch.backend_kit import caches
    from te_dispatch_rocm import devices, libraries

    monkeypatch.setenv("TE_DISPATCH_ROCM_PATH", str(host_folder))
    monkeypatch.setenv("TE_DISPATCH_ROCM_MEMORY", "host")
    monkeypatch.setenv("HOST_HIP_DEVICES", ",".join(CHIPS))
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    memoized = (libraries.hip, libraries.hipblaslt, devices.found)

    def forget() -> None:
        for function in memoized:
            function.cache_clear()
        caches.clear("te_dispatch_rocm.")

    forget()
    from te_dispatch_rocm import gemm, gemm_grouped, gemm_plans, tuning, tuning_operands

    def use(chip: str) -> None:
        index = CHIPS.index(chip)
        for module in (gemm, gemm_grouped, tuning_operands):
            monkeypatch.setattr(module, "place_of", lambda x: (index, lambda device: 0))

    yield SimpleNamespace(
        gemm=gemm, grouped=gemm_grouped, plans=gemm_plans, tuning=tuning, operands=tuning_operands, native=native,
        use=use,
    )  # fmt: skip
    forget()
