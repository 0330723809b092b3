# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``pytest --pyargs te_dispatch.conformance``: its tests, its summary, its exit codes."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from te_dispatch.conformance import certification  # before pytester notes what is loaded: torch loads once
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.subject import Subject

# So does Triton, which a probe may import: a second import of its native module ends the process.
with contextlib.suppress(ImportError):
    importlib.import_module("triton")

pytestmark = pytest.mark.slow

pytest_plugins = "pytester"

KIT = ("--pyargs", "te_dispatch.conformance", "-p", "no:cacheprovider")
#: One operator of one backend, the numbers only: seconds.
SOFTMAX = ("--te-backend", "torch", "--te-op", "softmax_fwd", "--te-check", "values")
Kit = Callable[..., pytest.RunResult]


@pytest.fixture
def kit(pytester: pytest.Pytester) -> Kit:
    """Runs the kit in this process, units too."""

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(*KIT, "--te-in-process", *arguments)

    return run


@pytest.fixture
def wrong_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's softmax is 3 % too large."""
    right = Subject.call

    def call(self: Subject, arguments: Any) -> Any:
        result = right(self, arguments)
        if self.id == "torch.softmax_fwd":
            result.mul_(1.03)
        return result

    monkeypatch.setattr(Subject, "call", call)


@pytest.fixture
def refusing_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's softmax declines everything."""
    from te_dispatch.core.errors import Declined

    def call(self: Subject, arguments: Any) -> Any:
        raise Declined("the unit is busy")

    monkeypatch.setattr(Subject, "call", call)


def _units(result: pytest.RunResult) -> list[str]:
    """Ids of the units that a ``-v`` run or a collection shows."""
    return re.findall(r"test_conformance\.py::test_unit\[(.*\])\]", result.stdout.str())


def _summary(result: pytest.RunResult) -> dict[str, int]:
    [line] = re.findall(r"^claimed .*$", result.stdout.str(), re.MULTILINE)
    return {
        name: int(number) for name, number in re.findall(r"([a-z ]+) (\d+)", line.partition(":")[0].replace(",", ""))
    }


def _counted(result: pytest.RunResult) -> dict[str, int]:
    return {name.strip(): number for name, number in _summary(result).items()}


def test_every_unit_is_a_test_with_a_readable_id(kit: Kit) -> None:
    result = kit(*SOFTMAX, "--collect-only", "-q")
    ids = _units(result)
    assert result.ret == 0 and len(ids) == len(set(ids)) > 3
    for text in ids:
        unit = Unit.parse(text)
        assert (unit.implementation, unit.check, unit.case.operator) == ("torch.softmax_fwd", "values", "softmax_fwd")
        assert unit.id == text


def test_all_passed(kit: Kit) -> None:
    result = kit(*SOFTMAX, "-v")
    units = len(set(_units(result)))
    assert result.ret == 0
    assert _counted(result) == {"claimed": units, "passed": units, "failed": 0, "not claimed": 0}


def test_failures_say_what_is_wrong_and_how_to_see_it_again(kit: Kit, wrong_softmax: None) -> None:
    result = kit(*SOFTMAX)
    assert result.ret == 1
    counts = _counted(result)
    assert counts["failed"] > 0 and counts["claimed"] == counts["passed"] + counts["failed"]
    result.stdout.re_match_lines([r"result\[.*\] is .*, expected .* within .* elements are wrong\)"])
    result.stdout.fnmatch_lines(["te-dispatch conformance --unit 'torch.softmax_fwd/values/softmax_fwd.plain*'"])


def test_not_claimed_is_a_category_of_its_own(kit: Kit, pytester: pytest.Pytester) -> None:
    result = kit("--te-backend", "torch", "--te-op", "grouped_gemm", "--te-check", "values", "--junitxml", "j.xml")
    counts = _counted(result)
    assert result.ret == 0 and counts["not claimed"] > 0 and counts["claimed"] == counts["passed"] > 0
    result.assert_outcomes(passed=counts["passed"])  # neither passed nor skipped
    result.stdout.fnmatch_lines([f"*{counts['not claimed']} not claimed*"])
    skipped = ElementTree.parse(pytester.path / "j.xml").getroot().findall(".//skipped")
    assert len(skipped) == counts["not claimed"]
    assert all(str(one.get("message")).startswith("not claimed: ") for one in skipped)


def test_nothing_claimed_is_no_success(kit: Kit, refusing_softmax: None) -> None:
    result = kit(*SOFTMAX)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["claimed 0, passed 0, failed 0, *: nothing was claimed, so nothing is certified"])


def test_nothing_to_run_is_a_usage_error(kit: Kit) -> None:
    result = kit("--te-backend", "torch", "--te-op", "softmax_fwd", "--te-check", "operand_format")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*nothing to run: torch implements nothing of what was asked for"])


REFUSED = (
    (("--te-backend", "acne"), "backend: 'acne' is not installed; installed: "),
    (("--te-against", "acne"), "backend: 'acne' is not installed"),
    (("--te-op", "gem"), "op: 'gem' is no operator, family or glob"),
    (("--te-check", "vales"), "check: got 'vales', expected one of: values"),
    (("--te-level", "fool"), "level: got 'fool', expected one of smoke, full, soak"),
    (("--te-device", "cpux"), "device: 'cpux' cannot be used"),
    (("--te-limit", "0"), "limit: got 0.0, expected seconds above 0"),
    (("--te-limit", "nan"), "limit: got nan, expected seconds above 0"),
    (("--te-seed", "x"), "argument --te-seed: invalid int value: 'x'"),
    (("--te-skip-file", "/nowhere/skip.txt"), "/nowhere/skip.txt: cannot be read"),
    (("--te-expect-file", "/nowhere/known.txt"), "/nowhere/known.txt: cannot be read"),
)


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_bad_options_are_usage_errors(kit: Kit, arguments: tuple[str, ...], message: str) -> None:
    extra = () if arguments[0] == "--te-op" else ("--te-op", "softmax_fwd")
    result = kit(*extra, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()
    assert "Traceback" not in result.stderr.str() and "Error" not in result.stdout.str()


def test_bad_options_are_usage_errors_however_the_tests_are_found(pytester: pytest.Pytester, kit: Kit) -> None:
    import te_dispatch.conformance

    folder = str(Path(te_dispatch.conformance.__file__).parent)
    for place in (folder, f"{folder}/test_conformance.py", "te_dispatch.conformance.test_conformance"):
        result = pytester.runpytest_inprocess("--pyargs", place, "-p", "no:cacheprovider", "--te-backend", "acne")
        assert result.ret == pytest.ExitCode.USAGE_ERROR, place
        assert "backend: 'acne' is not installed" in result.stderr.str() + result.stdout.str()


def _file(pytester: pytest.Pytester, text: str) -> str:
    path = pytester.path / "units.txt"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("option", ["--te-skip-file", "--te-expect-file"])
def test_stale_patterns_and_lines_without_reason_are_usage_errors(
    kit: Kit, pytester: pytest.Pytester, option: str
) -> None:
    result = kit(*SOFTMAX, option, _file(pytester, "*softmax_fwd*  # all\nacme.gone/*  # was there once\n"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "no unit matches (a misspelt or stale pattern): " in result.stderr.str()
    assert "units.txt:2: acme.gone/*" in result.stderr.str()
    result = kit(*SOFTMAX, option, _file(pytester, "*softmax_fwd*\n"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR and "has no reason" in result.stderr.str()


def test_skipped_units_do_not_run(kit: Kit, pytester: pytest.Pytester, wrong_softmax: None) -> None:
    result = kit(*SOFTMAX, "--te-skip-file", _file(pytester, "*dtype=*  # out of order\n"), "-rs")
    assert result.ret == 1  # nothing is left that could be certified
    result.stdout.fnmatch_lines(["claimed 0, *skipped *nothing is certified"])
    result.stdout.fnmatch_lines(["*out of order (*units.txt:1)"])


FULL = (*SOFTMAX, "--te-level", "full")


def test_at_level_full_what_is_claimed_and_was_not_run_fails_the_run(kit: Kit, pytester: pytest.Pytester) -> None:
    whole = kit(*FULL)
    assert whole.ret == 0
    whole.stdout.fnmatch_lines(["no certificate: only operators softmax_fwd; only checks values"])
    whole.stdout.no_fnmatch_line("*never run*")
    result = kit(*FULL, "--te-skip-file", _file(pytester, "*dtype=fp32*  # no exp\n"))
    assert result.ret == 1 and _counted(result)["failed"] == 0
    result.stdout.fnmatch_lines(["Claimed but never run: torch.softmax_fwd: softmax_fwd.*dtype=fp32*"])
    result.stdout.fnmatch_lines(["no certificate: *combinations are claimed but were never run"])


def test_an_implementation_that_dispatch_refuses_fails_the_run(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests pass: none is of it."""
    monkeypatch.setattr(certification, "refused", lambda *_: {"torch.mine": "operator 'sotfmax' does not exist"})
    result = kit(*SOFTMAX)
    assert result.ret == pytest.ExitCode.TESTS_FAILED and not _counted(result).get("failed")
    result.stdout.fnmatch_lines(["no certificate: *torch.mine is refused: operator 'sotfmax' does not exist*"])


def test_a_part_of_the_tests_is_no_certificate(kit: Kit) -> None:
    result = kit(*FULL, "-k", "fp32")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["no certificate: * units of the plan were deselected or did not run; *"])


def test_cases_in_place_of_declined_ones_are_run_and_counted(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch.core.errors import Declined

    right = Subject.call
    asked: list[tuple[object, ...]] = []

    def call(self: Subject, arguments: Any) -> Any:
        x = arguments["x"]
        if self.id == "torch.softmax_fwd":
            asked.append((x.dtype, x.shape))
            if x.shape[-1] % 2 and str(x.dtype) == "torch.bfloat16":
                raise Declined("odd rows in bf16")
        return right(self, arguments)

    monkeypatch.setattr(Subject, "call", call)
    result = kit(*FULL, "-v")
    assert result.ret == 0, result.stdout.str()
    counts = _counted(result)
    tests = len(set(_units(result)))
    assert counts["not claimed"] > 0
    assert counts["claimed"] + counts["not claimed"] > tests  # more cases than tests


def test_an_expected_failure_that_passes_fails(kit: Kit, pytester: pytest.Pytester) -> None:
    result = kit(*SOFTMAX, "--te-expect-file", _file(pytester, "*dtype=fp32*  # no exp\n"))
    assert result.ret == 1 and _counted(result)["failed"] > 0
    result.stdout.fnmatch_lines(["passes, but *units.txt:1 expects a failure (no exp): take the line out"])


def test_known_failures_are_counted_apart(kit: Kit, pytester: pytest.Pytester, wrong_softmax: None) -> None:
    failing = _units_that_failed(kit(*SOFTMAX, "-rf"))
    known = _file(pytester, "".join(f"{unit}  # off by 3 %\n" for unit in failing))
    result = kit(*SOFTMAX, "--te-expect-file", known)
    counts = _counted(result)
    assert result.ret == 0
    assert counts["expected failures"] == len(failing) and counts["failed"] == 0
    assert counts["claimed"] == counts["passed"] + len(failing)
    # What is asked for with --runxfail is to see them fail, not to have them pass.
    assert _counted(kit(*SOFTMAX, "--te-expect-file", known, "--runxfail"))["failed"] == len(failing)


def _units_that_failed(result: pytest.RunResult) -> list[str]:
    found = re.findall(r"^FAILED .*?test_unit\[(.*?\])\]", result.stdout.str(), re.MULTILINE)
    assert found
    return found


def test_other_tests_beside_the_kit_are_not_counted(kit: Kit, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_conformance="import pytest\ndef test_own(): pass\ndef test_off(): pytest.skip('off')\n")
    result = kit(*SOFTMAX, str(pytester.path / "test_conformance.py"))
    counts = _counted(result)
    result.assert_outcomes(passed=counts["passed"] + 1, skipped=1)


def test_runs_without_the_kit_say_nothing_and_load_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_own(): assert not {'torch', 'numpy'} & set(sys.modules)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*te_dispatch conformance*")


@pytest.mark.slow
def test_under_xdist_with_workers(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    arguments = ("--te-backend", "torch", "--te-op", "grouped_gemm", "--te-check", "values", "-n", "2")
    result = pytester.runpytest_subprocess(*KIT, *arguments, "-v")
    counts = _counted(result)
    assert result.ret == 0 and counts["passed"] > 0 and counts["not claimed"] > 0
    assert len(set(_units(result))) == counts["claimed"] + counts["not claimed"]
    refused = pytester.runpytest_subprocess(*KIT, *arguments, "--te-level", "fool")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert refused.stderr.str().count("level: got 'fool', expected one of smoke, full, soak") == 1


def test_the_plugin_is_found_by_its_entry_point() -> None:
    from importlib.metadata import entry_points

    [found] = [point for point in entry_points(group="pytest11") if point.name == "te_dispatch_conformance"]
    assert found.load() is sys.modules["te_dispatch.conformance.pytest_plugin"]
