# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Triton reads TRITON_INTERPRET when a kernel is defined, so a process either interprets kernels or compiles them.

Tests marked ``interpreted`` call operators on CPU tensors: in a process that compiles, pytest is started once for each
module with the variable set, and its verdicts are taken. Tests marked ``compiles`` need Triton's compiler: a process
that interprets skips them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from te_dispatch_triton import probe, targets

_HERE = Path(__file__).parent
_LIMIT = 400.0  # seconds for the interpreted tests of a module


@pytest.fixture
def hopper() -> Iterator[targets.Target]:
    """The CPU stands for an H200 or H100: host code chooses for it, and what it launches is recorded or compiled."""
    cpu, target = torch.device("cpu"), targets.target_for("nvidia", "sm_90", 132)
    targets.pretend(cpu, target)
    yield target
    targets.pretend(cpu, None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs kernels through Triton's interpreter, in a process for it")
    config.addinivalue_line("markers", "compiles: needs Triton's compiler, so not a process that interprets")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted kernels take seconds each."""
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("interpreted") is not None:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marked = item.get_closest_marker("interpreted") or item.get_closest_marker("compiles")
    if marked is not None and (reason := probe.missing_triton()) is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    if item.get_closest_marker("compiles") is not None and probe.interpreting():
        pytest.skip("this process interprets kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("interpreted") is None or probe.interpreting():
        return None
    verdicts, told = _interpreted(pyfuncitem.path, pyfuncitem.config.rootpath)
    verdict = verdicts.get(pyfuncitem.name, f"did not run:\n{told}")
    if verdict.startswith("skipped"):
        pytest.skip(verdict)
    if verdict:
        pytest.fail(verdict, pytrace=False)
    return True


@functools.cache
def _interpreted(path: Path, root: Path) -> tuple[dict[str, str], str]:
    """(test -> what went wrong, empty where nothing did, of a module's interpreted tests; what pytest printed)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, probe.INTERPRET: "1", "OMP_NUM_THREADS": "1"}
        for name in [name for name in environment if name.startswith("PYTEST_")]:
            del environment[name]
        arguments = ["-m", "interpreted", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--rootdir={root}"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments, str(path)],
            env=environment, cwd=root, capture_output=True, text=True, timeout=_LIMIT,
        )  # fmt: skip
        told = (run.stdout + run.stderr)[-4000:]
        if not report.exists():
            return {}, told
        verdicts = {}
        for case in ElementTree.parse(report).iter("testcase"):
            wrong = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
            skipped = "skipped: " if wrong is not None and wrong.tag == "skipped" else ""
            verdicts[case.get("name", "")] = "" if wrong is None else f"{skipped}{wrong.get('message')}\n{wrong.text}"
        return verdicts, told
