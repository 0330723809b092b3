# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The kit as pytest tests, for a vendor's own CI:

    pytest --pyargs te_dispatch.conformance --te-backend acme --te-level full

Every unit is one test. One that the implementation's requirements reject is reported as *not claimed*, in a category of
its own. A run of all units at level full also runs cases in place of declined ones, at its end, and fails if anything
claimed was never run. pytest loads this module in every run of a project that has te_dispatch installed, so it imports
nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from te_dispatch.conformance.expectations import Expectations
    from te_dispatch.conformance.outcome import Outcome
    from te_dispatch.conformance.planning import Plan
    from te_dispatch.conformance.report.record import Report
    from te_dispatch.conformance.settings import Settings

NOT_CLAIMED = "not claimed"
#: Property of a test's report that holds its unit's id; it is in pytest's own JUnit XML too.
UNIT = "te_dispatch_unit"
#: Properties that hold its outcome's message and cause, where it is not claimed.
MESSAGE, CAUSE = "te_dispatch_message", "te_dispatch_cause"
#: So many combinations that were never run are shown for each implementation.
_SHOWN = 20
_PLANNED = pytest.StashKey["tuple[Plan, Expectations]"]()
_REPORT = pytest.StashKey["Report"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("te_dispatch conformance")
    group.addoption("--te-backend", action="append", default=[], help="backend to certify; repeat it")
    group.addoption("--te-against", default="reference", help="the backend that is taken to be right")
    group.addoption("--te-op", action="append", default=[], help="operator, family or glob; repeat it")
    group.addoption("--te-check", action="append", default=[], help="only this check; repeat it")
    group.addoption("--te-level", default="smoke", help="smoke, full or soak")
    group.addoption("--te-seed", type=int, default=0, help="of the data")
    group.addoption("--te-device", default=None, help="PyTorch device")
    group.addoption("--te-product", action="store_true", help="every combination, not every pair")
    group.addoption("--te-limit", type=float, default=60.0, metavar="SECONDS", help="for each unit")
    group.addoption("--te-in-process", action="store_true", help="no worker process: a crash ends pytest")
    group.addoption("--te-skip-file", default=None, metavar="FILE", help="units to leave out, with reasons")
    group.addoption("--te-expect-file", default=None, metavar="FILE", help="units known to fail, with reasons")


def settings_of(config: pytest.Config) -> Settings:
    """The run's settings from the command line.

    Raises:
        pytest.UsageError: an option has a value that does not exist.
    """
    from te_dispatch.conformance.settings import Settings, UsageError

    option = config.getoption
    try:
        return Settings(
            backends=tuple(option("--te-backend")),
            against=option("--te-against"),
            operators=tuple(option("--te-op")),
            checks=tuple(option("--te-check")),
            level=option("--te-level"),
            seed=option("--te-seed"),
            device=option("--te-device"),
            product=option("--te-product"),
            limit_s=option("--te-limit"),
            isolated=not option("--te-in-process"),
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    """Refuse bad options before anything is collected: pytest then says just that, and exits with 4."""
    # Under pytest-xdist the process that was started by hand says it, once.
    if not hasattr(config, "workerinput") and any(map(_asks_for_the_kit, config.args)):
        planned(config)


def _asks_for_the_kit(argument: str) -> bool:
    name = argument.partition("::")[0]
    tests = Path(__file__).with_name("test_conformance.py")
    return name.startswith("te_dispatch.conformance") or tests.is_relative_to(Path(name).resolve())


def planned(config: pytest.Config) -> tuple[Plan, Expectations]:
    """The run's plan, and what the vendor's files expect of its units.

    Raises:
        pytest.UsageError: something was asked for that does not exist, a line of a file matches nothing, or there is
            nothing to run, which must not look like success.
    """
    if _PLANNED not in config.stash:
        config.stash[_PLANNED] = _plan(config)
    return config.stash[_PLANNED]


def _plan(config: pytest.Config) -> tuple[Plan, Expectations]:
    import contextlib
    import dataclasses

    from te_dispatch.conformance.emulated import device_entered, emulated_device
    from te_dispatch.conformance.expectations import Expectations
    from te_dispatch.conformance.planning import plan
    from te_dispatch.core import scopes
    from te_dispatch.core.trial import FatalPlugin, refuse_fatal, refuse_fatal_targets

    settings = settings_of(config)
    try:
        refuse_fatal(None if emulated_device(settings) else settings.device)
        refuse_fatal_targets(scopes.MANAGER.snapshot, settings.backends)
        # Until pytest ends: units may run in this process.
        entered = contextlib.ExitStack()
        entered.enter_context(device_entered(scopes.MANAGER, settings))
        config.add_cleanup(entered.close)
        made = plan(scopes.MANAGER, settings)
        # Each unit becomes a test, which pytest holds in memory anyway.
        made = dataclasses.replace(made, units=list(made.units))
        expectations = Expectations.load(config.getoption("--te-skip-file"), config.getoption("--te-expect-file"))
        whole = dataclasses.replace(settings, level="full", product=False)
        expectations.check(list(made.units), lambda: plan(scopes.MANAGER, whole).units)
    except (ValueError, FatalPlugin) as error:
        raise pytest.UsageError(str(error)) from error
    if not made.units:
        backends = ", ".join(settings.backends) or f"no backend but {settings.against}"
        raise pytest.UsageError(f"nothing to run: {backends} implements nothing of what was asked for")
    return made, expectations


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    if report.skipped and isinstance(report.longrepr, tuple) and f"Skipped: {NOT_CLAIMED}" in str(report.longrepr[2]):
        return NOT_CLAIMED, "n", "NOT CLAIMED"
    return None


#: pytest's categories -> states of the kit's outcomes.
_STATES = {
    "passed": "passed",
    "failed": "failed",
    "xfailed": "expected_failure",
    "skipped": "skipped",
    NOT_CLAIMED: "not_claimed",
}


def _outcomes(config: pytest.Config) -> list[Outcome]:
    """Of the kit's tests; other tests may have run beside them."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reports = [
        (dict(getattr(report, "user_properties", ())), state)
        for category, state in _STATES.items()
        for report in (reporter.stats.get(category, ()) if reporter is not None else ())
        if report.when == "call"
    ]
    ran = [(said, state) for said, state in reports if UNIT in said]
    if not ran:
        return []
    from te_dispatch.conformance.outcome import Outcome

    return [Outcome(said[UNIT], state, said.get(MESSAGE, ""), cause=said.get(CAUSE, "")) for said, state in ran]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return
    outcomes = _outcomes(config)
    if not outcomes:
        return
    report = config.stash[_REPORT] = _report(config, outcomes)
    if not report.ok and exitstatus == pytest.ExitCode.OK:
        # A driver that was not found, say: nothing was tested, which must not look like a certificate.
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _report(config: pytest.Config, outcomes: list[Outcome]) -> Report:
    """What the tests found, and, where all of the plan was run, what its end adds."""
    from te_dispatch.conformance import certification, planning, running
    from te_dispatch.conformance.report.record import Report
    from te_dispatch.core import scopes

    made, expectations = planned(config)
    report = Report(settings_of(config), {}, outcomes)
    left = {unit.id for unit in made.units} - {outcome.unit for outcome in outcomes}
    if left:
        report.partial = f"{len(left)} units of the plan were deselected or did not run"
        report.refused = planning.refused(scopes.MANAGER, report.settings, outcomes, single=False)
        return report

    def do(more: Plan) -> None:
        report.outcomes += map(expectations.judged, running.run(list(more.units), report.settings))

    certification.complete(scopes.MANAGER, report, made, do)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    report = terminalreporter.config.stash.get(_REPORT, None)
    if report is None:
        return
    counts = report.counts
    terminalreporter.section("te_dispatch conformance")
    in_tests = {outcome.unit for outcome in _outcomes(terminalreporter.config)}
    for outcome in report.failures():
        if outcome.unit not in in_tests:  # a case in place of a declined one, which is no test
            terminalreporter.line(f"FAILED {outcome.unit}\n  {outcome.message}\n  {report.reproducer(outcome)}")
    for implementation, goals in report.never_run.items():
        for goal in goals[:_SHOWN]:
            terminalreporter.line(f"Claimed but never run: {implementation}: {goal}")
        if goals[_SHOWN:]:
            terminalreporter.line(f"Claimed but never run: {implementation}: {len(goals) - _SHOWN} more")
    terminalreporter.line(
        f"claimed {counts['claimed']}, passed {counts['passed']}, failed {counts['failed']}, "
        f"not claimed {counts['not_claimed']}"
        + (f", expected failures {counts['expected_failure']}" if counts["expected_failure"] else "")
        + (f", skipped {counts['skipped']}" if counts["skipped"] else "")
        + ("" if counts["claimed"] else ": nothing was claimed, so nothing is certified")
    )
    terminalreporter.line(report.certificate)
