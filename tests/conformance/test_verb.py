# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch conformance``: its exit codes, its files, its document, and every way to be refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner, Result

from te_dispatch.cli.app import app
from te_dispatch.conformance import certification
from te_dispatch.conformance.code import digests
from te_dispatch.conformance.outcome import STATES
from te_dispatch.conformance.report import record
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.subject import Subject

pytestmark = pytest.mark.slow

#: Fast, and enough for everything here: both softmax operators, the numbers only.
#: Of the one backend that claims them on every machine.
SOFTMAX = ("--op", "softmax", "--check", "values", "--backend", "torch")


class Verb:
    """Runs the verb in this process, its files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, isolated: bool = False, out: bool = True) -> Result:
        where = [*([] if isolated else ["--in-process"]), *(["--out", str(self.folder)] if out else [])]
        result = CliRunner().invoke(app, ["conformance", *arguments, *where], env={"COLUMNS": "240"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def refused(self, *arguments: str, **how: bool) -> str:
        """The message of a run that must be refused; it is the only thing that is said."""
        result = self(*arguments, **how)
        assert result.exit_code == 2, result.output
        assert not result.stdout and result.stderr.startswith("te-dispatch: ") and "unexpected" not in result.stderr
        return result.stderr

    @property
    def report(self) -> Report:
        return Report.load(self.folder / "conformance.json")


@pytest.fixture
def verb(tmp_path: Path) -> Verb:
    return Verb(tmp_path / "out")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the units that really run, as they are handed out."""
    found: list[str] = []
    run = certification.running.run

    def recorded(units: Any, settings: Any) -> Any:
        found.extend(unit.id for unit in units)
        return run(units, settings)

    monkeypatch.setattr(certification.running, "run", recorded)
    return found


@pytest.fixture
def wrong_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every softmax of the backend ``torch`` is off by 3 %."""
    call = Subject.call

    def wrong(self: Subject, arguments: Any) -> Any:
        result = call(self, arguments)
        return result * 1.03 if self.id == "torch.softmax_fwd" else result

    monkeypatch.setattr(Subject, "call", wrong)


def test_a_run_that_passes(verb):
    result = verb(*SOFTMAX)
    assert result.exit_code == 0, result.output
    report = verb.report
    assert report.ok and report.counts["claimed"] == len(report.outcomes) > 2
    assert f"{report.counts['claimed']} claimed, {report.counts['passed']} passed, 0 failed" in result.stdout
    assert "softmax_fwd" in result.stdout and "softmax_bwd" in result.stdout
    for name in ("conformance.html", "conformance.json", "conformance.md", "conformance.xml"):
        assert str(verb.folder / name) in result.stdout and (verb.folder / name).stat().st_size > 200
    root = ElementTree.parse(verb.folder / "conformance.xml").getroot()
    assert len(list(root.iter("testcase"))) == len(report.outcomes)


def test_a_run_that_fails(verb, wrong_softmax):
    result = verb(*SOFTMAX)
    assert result.exit_code == 1
    failures = verb.report.failures()
    assert failures and all(outcome.parsed.implementation == "torch.softmax_fwd" for outcome in failures)
    assert f"FAILED {failures[0].unit}" in result.stdout and failures[0].message in result.stdout
    assert failures[0].reproducer in result.stdout
    assert failures[0].unit in (verb.folder / "conformance.html").read_text()
    assert f"{len(failures)} failed" in result.stdout


def test_checks_can_be_left_out(verb):
    result = verb("--op", "softmax_fwd", "--backend", "torch", "--skip-check", "threads", "--skip-check", "values")
    assert result.exit_code == 0, result.output
    ran = {outcome.parsed.check for outcome in verb.report.outcomes}
    assert "strided" in ran and ran.isdisjoint({"threads", "values"})


def test_many_failures_are_not_all_printed(verb, wrong_softmax):
    result = verb("--op", "softmax_fwd", "--level", "full", "--check", "values")
    failures = len(verb.report.failures())
    assert failures > 10 and result.stdout.count("FAILED ") == 10
    assert f"and {failures - 10} more failures" in result.stdout


def test_nothing_claimed_is_no_success(verb, tmp_path):
    skip = tmp_path / "skip.txt"
    skip.write_text("*softmax*  # all of it\n")
    result = verb(*SOFTMAX, "--skip-file", str(skip))
    assert result.exit_code == 1 and "nothing is certified" in result.stdout
    assert {outcome.state for outcome in verb.report.outcomes} == {"skipped"}


def test_what_is_not_claimed_is_listed(verb):
    result = verb("--op", "grouped_gemm", "--check", "values")
    assert result.exit_code == 0, result.output
    reasons = verb.report.not_claimed()
    assert reasons
    for implementation, found in reasons.items():
        assert implementation in result.stdout and max(found, key=lambda reason: found[reason]) in result.stdout


def test_json_is_one_document_and_nothing_else(verb):
    result = verb(*SOFTMAX, "--json")
    assert result.exit_code == 0 and not result.stderr
    document = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    files = document.pop("files")
    assert document == json.loads((verb.folder / "conformance.json").read_text())
    assert {Path(path).name for path in files.values()} == {
        f"conformance.{name}" for name in ("html", "json", "md", "xml")
    }
    assert set(document["counts"]) == {*STATES, "claimed"}
    assert document["settings"]["operators"] == ["softmax"] and document["environment"]["backends"]


def test_json_of_a_mistake_is_a_document_too(verb):
    result = verb("--op", "nope", "--json")
    assert result.exit_code == 2 and "op: 'nope'" in json.loads(result.stdout)["error"]


def test_quiet_says_nothing_on_the_way(verb):
    assert "units" in verb(*SOFTMAX).stderr
    assert not verb(*SOFTMAX, "--quiet").stderr


REFUSED = (
    (("--backend", "acne"), "backend: 'acne' is not installed; installed: "),
    (("--against", "acne"), "backend: 'acne' is not installed"),
    (("--op", "gem"), "op: 'gem' is no operator, family or glob"),
    (("--level", "fool"), "level: got 'fool', expected one of smoke, full, soak"),
    (("--check", "vales"), "check: got 'vales', expected one of: values"),
    (("--skip-check", "vales"), "check: got 'vales', expected one of: values"),
    (("--check", "values", "--skip-check", "values"), "--skip-check: leaves no check of values"),
    (("--shard", "3/2"), "shard: got 3/2, expected i/n with 1 <= i <= n"),
    (("--shard", "0/2"), "shard: got 0/2"),
    (("--shard", "1"), "--shard: got '1', expected I/N"),
    (("--shard", "a/b"), "--shard: got 'a/b', expected I/N"),
    (("--shard", "1/²"), "--shard: got '1/²', expected I/N"),
    (("--device", "cpux"), "device: 'cpux' cannot be used"),
    (("--skip-file", "/nowhere/skip.txt"), "/nowhere/skip.txt: cannot be read"),
    (("--expect-file", "/nowhere/known.txt"), "/nowhere/known.txt: cannot be read"),
    (("--resume",), "resume: "),
    (("--unit", "softmax"), "unit: got 'softmax', expected implementation/check/operator.space[axis=value,...]"),
    (("--unit", "torch.softmax_fwd/values/softmax_fwd"), "case: got 'softmax_fwd', expected operator.space"),
    (("--unit", "torch.x/values/softmax_fwd.plain[]"), "'torch.x' does not implement softmax_fwd, expected one of: "),
    (("--unit", "torch.softmax_fwd/vales/softmax_fwd.plain[]"), "check: got 'vales'"),
    (("--unit", "torch.softmax_fwd/values/softmax.plain[]"), "operator: 'softmax' is none of"),
    (("--unit", "torch.softmax_fwd/values/softmax_fwd.x[]"), "softmax_fwd has no space 'x', expected one of: "),
    (("--unit", "torch.softmax_fwd/values/softmax_fwd.plain[size=1]"), "softmax_fwd.plain has the axes dtype, "),
)


@pytest.mark.parametrize("arguments, message", REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_bad_input_is_refused(verb, arguments, message):
    # A unit's id says all about it: nothing else goes with it.
    extra = () if "--unit" in arguments or "--op" in arguments else ("--op", "softmax_fwd")
    assert message in verb.refused(*arguments, *extra)


def test_a_value_that_an_axis_lacks_is_refused(verb):
    verb("--op", "softmax_fwd", "--check", "values")
    unit = verb.report.outcomes[0].unit
    assert "dtype=fp32" in unit
    message = verb.refused("--unit", unit.replace("dtype=fp32", "dtype=fp7"))
    assert "softmax_fwd.plain has no dtype 'fp7', expected one of: fp32" in message


def test_a_unit_chooses_alone(verb):
    message = verb.refused("--unit", "a/b/c.d[]", "--op", "gemm", "--level", "full", "--shard", "1/2")
    assert "--unit: names all that runs; leave --op and --level and --shard away" in message


def test_a_stale_pattern_is_refused(verb, tmp_path):
    skip = tmp_path / "skip.txt"
    skip.write_text("# of the vendor\n*softmax_fwd*  # no exp\nacme.gone/*  # was there once\n")
    assert f"no unit matches (a misspelt or stale pattern): {skip}:3: acme.gone/*" in verb.refused(
        *SOFTMAX, "--skip-file", str(skip)
    )


def test_a_pattern_without_a_reason_is_refused(verb, tmp_path):
    known = tmp_path / "known.txt"
    known.write_text("*softmax_fwd*\n")
    message = verb.refused(*SOFTMAX, "--expect-file", str(known))
    assert f"{known}:1: '*softmax_fwd*' has no reason" in message


def test_an_expected_failure_that_passes_fails(verb, tmp_path):
    known = tmp_path / "known.txt"
    known.write_text("*softmax_fwd*  # no exp\n")
    result = verb(*SOFTMAX, "--expect-file", str(known))
    assert result.exit_code == 1 and "take the line out" in result.stdout.replace("\n", " ")
    assert verb.report.counts["unexpected_pass"] > 0


def test_an_expected_failure_that_fails_is_known(verb, tmp_path, wrong_softmax):
    # Not every case: where a row has one element or none, 3 % more of it stays within the bound or does not exist.
    verb(*SOFTMAX)
    known = tmp_path / "known.txt"
    known.write_text("".join(f"{outcome.unit}  # off by 3 %\n" for outcome in verb.report.failures()))
    result = verb(*SOFTMAX, "--expect-file", str(known))
    assert result.exit_code == 0 and "known" in result.stdout
    assert verb.report.counts["expected_failure"] > 0 and verb.report.ok


def test_a_file_in_the_place_of_the_folder_is_refused(verb):
    verb.folder.write_text("mine")
    assert "is no folder and cannot be made one" in verb.refused(*SOFTMAX)
    assert verb.folder.read_text() == "mine"


def test_resume_runs_only_what_is_left(verb, ran):
    assert verb(*SOFTMAX, "--shard", "1/2").exit_code == 0
    first = [*ran]
    ran.clear()
    before = {outcome.unit: outcome.seconds for outcome in verb.report.outcomes}
    assert verb(*SOFTMAX, "--resume").exit_code == 0
    assert ran and not set(ran) & set(first)
    assert [outcome.unit for outcome in verb.report.outcomes] == [*first, *ran]
    assert {o.unit: o.seconds for o in verb.report.outcomes if o.unit in before} == before
    ran.clear()
    assert verb(*SOFTMAX, "--resume").exit_code == 0
    assert not ran and verb.report.ok


def test_resume_after_a_line_that_was_half_written(verb, ran):
    verb(*SOFTMAX)
    journal = verb.folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:3], lines[3][: len(lines[3]) // 2]]))
    total = len(ran)
    ran.clear()
    assert verb(*SOFTMAX, "--resume").exit_code == 0
    assert len(ran) == total - 2


@pytest.mark.parametrize("change, message", (
    (("--seed", "1"), "seed was 0, now 1"),
    (("--level", "full"), "level was 'smoke', now 'full'"),
    (("--product",), "product was False, now True"),
))  # fmt: skip
def test_resume_of_another_run_is_refused(verb, change, message):
    verb(*SOFTMAX)
    kept = (verb.folder / "journal.jsonl").read_text()
    told = verb.refused(*SOFTMAX, *change, "--resume")
    assert "is of another run" in told and message in told
    assert (verb.folder / "journal.jsonl").read_text() == kept


def test_resume_after_a_kernel_was_changed_is_refused(verb, monkeypatch):
    """Its version stayed the same, and the outcomes of the old kernel certified the new one."""
    verb(*SOFTMAX)
    before = json.loads((verb.folder / "journal.jsonl").read_text().splitlines()[0])["environment"]["code"]
    assert set(before) >= {"te_dispatch", "te_dispatch_reference", "te_dispatch_torch"}
    monkeypatch.setattr(record, "digests", lambda *_: {**before, "te_dispatch_torch": "0" * 16})
    assert "is of another run: files of te_dispatch_torch changed since" in verb.refused(*SOFTMAX, "--resume")


def test_a_package_s_digest_is_of_names_and_contents(tmp_path, monkeypatch):
    package = tmp_path / "kernels_of_a_vendor"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    implementation = SimpleNamespace(target="kernels_of_a_vendor.norm:rmsnorm_fwd")
    backend = SimpleNamespace(manifest=SimpleNamespace(implementations=(implementation,)))
    manager = SimpleNamespace(snapshot=SimpleNamespace(backends={"vendor": backend}))
    found = [digests(manager, ["vendor"])["kernels_of_a_vendor"]]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "norm.pyc").write_text("")
    assert digests(manager, ["vendor"])["kernels_of_a_vendor"] == found[0]
    for name, text in (("__init__.py", "x = 2\n"), ("norm.py", "x = 2\n"), ("norm.py", "")):
        (package / name).write_text(text)
        found.append(digests(manager, ["vendor"])["kernels_of_a_vendor"])
    assert len(set(found)) == 4


def test_what_a_run_needs_is_looked_for_before_the_plan_is_made(verb, monkeypatch):
    """The plan of level full takes a minute."""

    def unwanted(*_):
        pytest.fail("the plan was made")

    monkeypatch.setattr("te_dispatch.conformance.certification.plan", unwanted)
    assert "journal.jsonl is not there, so there is no run to go on with" in verb.refused(*SOFTMAX, "--resume")
    assert "/nowhere/skip.txt: cannot be read" in verb.refused(*SOFTMAX, "--skip-file", "/nowhere/skip.txt")


def test_resume_of_no_journal_is_refused(verb):
    verb.folder.mkdir()
    (verb.folder / "journal.jsonl").write_text("shopping list\n")
    assert "is no journal of a conformance run" in verb.refused(*SOFTMAX, "--resume")


def test_a_printed_reproducer_works_as_printed(verb, tmp_path, wrong_softmax):
    printed = verb(*SOFTMAX).stdout
    line = next(line for line in printed.splitlines() if line.strip().startswith("te-dispatch conformance --unit "))
    command = [sys.executable, "-m", "te_dispatch.cli", *shlex.split(line)[1:]]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "240"}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)
    # In a process of its own the softmax is right again.
    assert done.returncode == 0, done.stderr
    report = Report.load(folder / "te_dispatch_conformance" / "unit" / "conformance.json")
    assert [outcome.unit for outcome in report.outcomes] == [verb.report.failures()[0].unit]
    assert report.outcomes[0].state == "passed" and "result" in done.stdout


def test_a_unit_does_not_replace_the_report_it_is_in(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verb(*SOFTMAX, out=False)
    page = tmp_path / "te_dispatch_conformance" / "conformance.html"
    before = page.read_text()
    unit = Report.load(page.with_suffix(".json")).outcomes[0].unit
    assert verb("--unit", unit, out=False).exit_code == 0
    assert page.read_text() == before


def test_a_unit_shows_what_was_judged(verb, wrong_softmax):
    verb(*SOFTMAX)
    failure = verb.report.failures()[0]
    result = verb("--unit", failure.unit)
    assert result.exit_code == 1
    finding = failure.findings[0]
    assert finding.actual in result.stdout and finding.expected in result.stdout and finding.limit in result.stdout


def test_units_in_workers_are_the_same_as_here(verb):
    verb(*SOFTMAX)
    here = [(outcome.unit, outcome.state, outcome.findings) for outcome in verb.report.outcomes]
    assert verb(*SOFTMAX, "--jobs", "2", isolated=True).exit_code == 0
    assert [(outcome.unit, outcome.state, outcome.findings) for outcome in verb.report.outcomes] == here
