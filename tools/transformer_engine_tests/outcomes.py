# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A pytest plugin: what became of each case of each test, written as it ends, so that a crash loses one case.

A line of the file it writes is a document ``{"function", "case", "outcome", "reason"}``. `outcome` is one of
`OUTCOMES`, or ``collected`` with the number of cases that a function has, or ``started``.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from placeholders import MissingName, Placeholder

#: In the order of the table. "not supported" is a NotImplementedError, as docs/transformer_engine.md lists them.
OUTCOMES = ("passed", "failed", "not supported", "needs", "skipped")

#: What PyTorch, and `te_dispatch.pytorch.make_graphed_callables`, say where a test needs a GPU and there is none.
_NO_CUDA = (
    *("not compiled with CUDA", "requires CUDA support", "no NVIDIA driver", "No CUDA GPUs are available"),
    "graphs read memory of cuda devices only",
)

#: What torch.compile makes of a NotImplementedError.
_COMPILED = re.compile(r"raised exception NotImplementedError\(['\"](.+)['\"]\)")

#: What a function of C says that was given a `Placeholder`.
_GIVEN = re.compile(r"Placeholder of ([\w.]+)")


def classify(error: BaseException) -> tuple[str, str]:
    """The outcome of a case that raised `error`, and its reason in one line."""
    for cause in _chain(error):
        if isinstance(cause, MissingName):
            return "needs", cause.name
        if given := _GIVEN.search(str(cause)):
            return "needs", given[1]
        if refused := _COMPILED.search(str(cause)):
            return "not supported", refused[1]
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if any(phrase in str(error) for phrase in _NO_CUDA):
        return "needs", "CUDA"
    outcome = "not supported" if isinstance(error, NotImplementedError) else "failed"
    return outcome, text if outcome != "failed" else f"{type(error).__name__}: {text}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


class Outcomes:
    """The plugin.

    Args:
        path: the file to write.
        limit: how many cases of each function to run, drawn at random and the same in every run; None for all.
    """

    def __init__(self, path: Path, limit: int | None) -> None:
        self._file = path.open("w", buffering=1)
        self._limit = limit
        self._worst: tuple[str, str] = ("passed", "")

    def _write(self, function: str, outcome: str, case: str = "", reason: str = "") -> None:
        self._file.write(json.dumps({"function": function, "case": case, "outcome": outcome, "reason": reason}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        for function, found in _by_function(items).items():
            self._write(function, "collected", case=str(len(found)))
        yield  # ``-k`` and its like deselect
        kept = set()
        for function, found in _by_function(items).items():
            some = min(len(found), self._limit or len(found))
            kept.update(random.Random(function).sample(found, some))
        items[:] = [item for item in items if item in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        report = yield
        if report.failed:
            outcome, reason = classify(report.call.excinfo.value)
            self._write("(import)", outcome, reason=reason)
        elif report.skipped:
            self._write("(import)", "skipped", reason=_skipped(report))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._worst = ("passed", "")
        self._write(_function(item), "started", case=item.name)
        Placeholder.in_test = True
        try:
            return (yield)
        finally:
            Placeholder.in_test = False
            outcome, reason = self._worst
            self._write(_function(item), outcome, case=item.name, reason=reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if self._worst[0] in ("passed", "skipped"):  # what came first is the reason
            if report.failed:
                missing = call.excinfo is None  # a strict xfail that passed
                self._worst = ("failed", "passed unexpectedly") if missing else classify(call.excinfo.value)
            elif report.skipped:
                self._worst = ("skipped", _skipped(report))
        return report


def _by_function(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[_function(item)].append(item)
    return cases


def _function(item: pytest.Item) -> str:
    """The name without its parameters, of the class too."""
    parts = item.nodeid.partition("[")[0].split("::")
    return "::".join(parts[1:])


def _skipped(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    return str(report.longrepr[2]).removeprefix("Skipped: ")
