# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module and its build. Without them tests are skipped, but never in CI, which builds them first."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BACKEND = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("te_dispatch_cuda") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # it is installed where its module is built (`make cuda`)


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


@pytest.fixture(scope="session")
def plan_of() -> Callable[[Any], Any]:
    """plan_of(operator) is the function that the manifest names as the plan of this host function."""
    from te_dispatch.core.bind import import_target
    from te_dispatch_cuda.implementations import IMPLEMENTATIONS

    def find(operator: Any) -> Any:
        name = f"{operator.__module__}:{operator.__name__}"
        plans = {one.plan for one in IMPLEMENTATIONS if one.target == name}
        (plan,) = plans
        return import_target(plan)

    return find


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


@pytest.fixture
def products(native: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """(what a product was prepared for, the tensors that its `Given` are) of every product that is made. It needs no
    GPU and no library."""
    import torch

    from te_dispatch.backend_kit import caches
    from te_dispatch_cuda import libraries

    # Imported as if the library were here: no product is launched.
    monkeypatch.setattr(libraries, "cublaslt", lambda: SimpleNamespace(path="nowhere"))
    for name in ("gemm_plans", "gemm_calls", "gemm", "gemm_grouped"):
        monkeypatch.delitem(sys.modules, f"te_dispatch_cuda.{name}", raising=False)
    stub = SimpleNamespace(**{name: getattr(native, name) for name in dir(native) if not name.startswith("__")})
    stub.open_cublaslt = lambda path: None
    monkeypatch.setitem(sys.modules, "te_dispatch_cuda._native", stub)
    gemm = importlib.import_module("te_dispatch_cuda.gemm")
    monkeypatch.setattr(sys.modules["te_dispatch_cuda"], "gemm", gemm, raising=False)
    made: list[Any] = []

    def prepare(*problem: Any) -> Any:
        *facts, places, count = problem
        low = None if facts[8] is None else facts[8].data_ptr() & 15

        def call(*tensors: Any) -> Any:
            assert len(tensors) == count
            given = tuple(None if place is None else tensors[place] for place in places)
            # As the native call looks at addresses.
            if (low == 0 and given[4].data_ptr() & 15) or any(calls.address(x) % facts[10] for x in given[:2]):
                return NotImplemented
            made.append((facts, given))
            return gemm.Gemm(torch.zeros(1), None, None)

        return call

    monkeypatch.setattr(gemm, "prepare_product", prepare)
    calls = sys.modules["te_dispatch_cuda.gemm_calls"]
    monkeypatch.setattr(calls, "address", lambda x: 0)  # as the device aligns
    yield made
    caches.clear("te_dispatch_cuda.gemm.")
