# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One test per unit; see `te_dispatch.conformance.pytest_plugin` for how to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from te_dispatch.conformance import pytest_plugin
from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.execute import run_unit
from te_dispatch.conformance.expectations import Expectations
from te_dispatch.conformance.isolation import Worker
from te_dispatch.conformance.outcome import Outcome, failed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    units = list(pytest_plugin.planned(metafunc.config)[0].units)
    metafunc.parametrize("unit", units, ids=[unit.id for unit in units])


@pytest.fixture(scope="session")
def expectations(pytestconfig: pytest.Config) -> Expectations:
    return pytest_plugin.planned(pytestconfig)[1]


@pytest.fixture(scope="session")
def run(pytestconfig: pytest.Config) -> Iterator[Callable[[Unit], Outcome]]:
    settings = pytest_plugin.settings_of(pytestconfig)
    if not settings.isolated:
        bench = bench_of(settings)
        yield lambda unit: run_unit(unit, bench)
        return
    worker = Worker(settings)
    try:
        yield worker.run
    finally:
        worker.stop()


def test_unit(
    unit: Unit,
    expectations: Expectations,
    run: Callable[[Unit], Outcome],
    record_property: Callable[[str, object], None],
) -> None:
    record_property(pytest_plugin.UNIT, unit.id)
    left_out = expectations.skipped(unit)
    if left_out is not None:
        pytest.skip(left_out.message)
    outcome = expectations.judged(run(unit))
    if outcome.state == "not_claimed":
        record_property(pytest_plugin.MESSAGE, outcome.message)
        record_property(pytest_plugin.CAUSE, outcome.cause)
        pytest.skip(f"{pytest_plugin.NOT_CLAIMED}: {outcome.message}")
    if outcome.state == "expected_failure":
        pytest.xfail(outcome.message)
        pytest.fail(outcome.message, pytrace=False)  # with --runxfail, the line above does nothing
    if failed(outcome):
        pytest.fail(f"{outcome.message}\n{outcome.reproducer}", pytrace=False)
