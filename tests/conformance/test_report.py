# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a run leaves behind: the JSON document, the JUnit XML, the page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.outcome import Outcome, counts, failed
from te_dispatch.conformance.report import drawing, junit, markdown, page, summary
from te_dispatch.conformance.report.record import Cell, Report
from te_dispatch.conformance.rules import HISTOGRAM, Finding, Within, judge

from . import sample_report

#: Elements that have no end tag.
VOID = {"meta", "input", "br", "wbr", "link", "img", "hr"}
HOSTILE = "</script><script>alert('1')</script><img src=x onerror=\"alert(2)\"> & \x00\udc80 ]]> {{ 7 * 7 }} {% raw %}"


class Page(HTMLParser):
    """A page as a person meets it: its text, its elements; and whether every element is closed where it must be.

    Attributes:
        commands: what the copy buttons copy.
        ids, opens: of elements, and of those that buttons open.
        scripts: how many there are.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.commands: list[str] = []
        self.ids: list[str] = []
        self.opens: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.elements: list[str] = []
        self._texts: list[str] = []
        self._command = False
        self.feed(text)
        self.close()
        self.text = " ".join(self._texts)
        assert not self.stack, f"not closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        assert len(named) == len(attrs), f"<{tag}> repeats an attribute: {attrs}"
        self.elements.append(tag)
        self.attributes += named.items()
        self.ids += [named["id"]] if "id" in named else []
        self.opens += [named[name] for name in ("data-opens", "data-then") if name in named]
        if named.get("class") == "command":
            self._command = True
            self.commands.append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]} at {self.getpos()}"
        self.stack.pop()
        if tag == "div":
            self._command = False

    def handle_data(self, data: str) -> None:
        if self._command and self.stack[-1] in ("code", "span"):
            self.commands[-1] += data
        if self.stack and self.stack[-1] not in ("style", "script"):
            self._texts.append(data)


@pytest.fixture(scope="module")
def mixed() -> Report:
    """Every state, and failures of every look."""
    states = sample_report.report(list(sample_report.every_state()))
    return dataclasses.replace(states, outcomes=[*states.outcomes, *sample_report.whole(700, 40, seed=3).outcomes[10:]])


@pytest.fixture(scope="module")
def mixed_text(mixed: Report) -> str:
    return page.render(mixed)


@pytest.fixture(scope="module")
def mixed_page(mixed_text: str) -> Page:
    return Page(mixed_text)


def test_json_comes_back_as_it_was(mixed, tmp_path):
    path = tmp_path / "report.json"
    mixed.save(path)
    assert Report.load(path) == mixed
    document = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert any(math.isinf(o.ratio) for o in mixed.outcomes), "the report holds no infinity to be tested"
    assert document["counts"] == mixed.counts and document["ok"] is False


def test_a_limit_that_is_no_number_passes_nothing(tmp_path):
    """It passed everything, with a ratio that JSON cannot hold."""
    limit = Within(torch.tensor([math.nan, math.nan, 1.0]))
    finding = judge("result", limit, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, 3.0]))
    assert not finding.passed and (finding.ratio, finding.bad, finding.index) == (math.inf, 1, (0,))
    outcome = Outcome(sample_report.unit("acme", "gemm", 1), "failed", finding.message, [finding])
    sample_report.report([outcome]).save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").outcomes == [outcome]


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99, expected 2"):
        Report.load(path)


def test_tables_hold_every_cell_failure_and_refusal(mixed):
    text = markdown.render(mixed)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [line.replace("\\|", "").count("|") for line in tables]
    starts = [place for place, line in enumerate(tables) if line.startswith("|---")]
    assert len(starts) == 3  # matrix, failures, not claimed
    for start, end in zip(starts, [*(place - 1 for place in starts[1:]), len(tables)]):
        assert set(widths[start - 1 : end]) == {widths[start]}
    assert all(f"| {cell.operator} |" in text for cell in mixed.cells())
    assert all(f"`{outcome.unit}`" in text for outcome in mixed.failures())
    assert all(f"| {name} | {sum(reasons.values())} |" in text for name, reasons in mixed.not_claimed().items())


def test_junit_counts_what_the_report_counts(mixed, tmp_path):
    junit.save(mixed, tmp_path / "report.xml")
    root = ElementTree.parse(tmp_path / "report.xml").getroot()
    suites = root.findall("testsuite")
    for suite in suites:
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped"))
        assert all(case.attrib["classname"].startswith(suite.attrib["name"] + ".") for case in cases)
    told = {name: sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "failures", "skipped")}
    found = mixed.counts
    left_out = found["not_claimed"] + found["skipped"] + found["expected_failure"]
    assert told == {
        "tests": len(mixed.outcomes),
        "failures": found["failed"] + found["unexpected_pass"],
        "skipped": left_out,
    }
    texts = [failure.text or "" for failure in root.iter("failure")]
    assert all(any(o.reproducer in text for text in texts) for o in mixed.failures())


def test_a_reproducer_runs_what_the_run_ran():
    outcome = Outcome(sample_report.unit("acme", "gemm", 1), "failed", "wrong")
    unit = f"te-dispatch conformance --unit '{outcome.unit}'"
    assert sample_report.report([outcome]).reproducer(outcome) == unit
    elsewhere = sample_report.report([outcome], against="torch", device="cuda:1")
    assert elsewhere.reproducer(outcome) == f"{unit} --against torch --device cuda:1"


def test_the_page_holds_every_failure_and_is_whole(mixed, mixed_page):
    found = mixed_page
    assert mixed.failures()
    for outcome in mixed.failures():
        assert mixed.reproducer(outcome) in found.commands
        assert outcome.message[:100] in found.text
    assert len(found.ids) == len(set(found.ids))
    assert found.opens and set(found.opens) <= set(found.ids)


def test_the_page_says_what_was_run_where(mixed, mixed_page):
    text = mixed_page.text
    said = ("acme", "full", "NVIDIA H100 80GB HBM3", "2026-11-20 09:30:00 UTC", "te-dispatch-torch 0.1.0", "12.8")
    assert [word for word in said if word not in text] == []
    assert dict(page._facts(mixed))["torch"] == "2.13.0", "a plugin's version hides the process's own"
    for name in ("claimed", "passed", "failed", "not_claimed"):
        assert re.search(rf"{name.replace('_', ' ')}\s*{mixed.counts[name]:,}\b", text), name
    for reasons in mixed.not_claimed().values():
        assert all(reason in text for reason in reasons)
    assert all(note in text for outcome in mixed.outcomes for note in outcome.notes)


def test_the_page_needs_nothing_else(mixed_page, mixed_text):
    found = mixed_page
    assert not {"link", "img", "iframe", "object", "embed"} & set(found.elements)
    assert found.elements.count("script") == found.elements.count("style") == 1
    # Namespaces are names; everything else that reads like an address would be fetched.
    assert [value for name, value in found.attributes if name in ("src", "href") and not value.startswith("#")] == []
    text = mixed_text
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and "url(" not in text


def test_hostile_text_stays_text(tmp_path):
    unit = Unit("torch.matmul", "values", Case.of("gemm", "plain", {"dtype": "<b>'\"&"})).id
    finding = Finding(HOSTILE, False, "within", 3.0, 1, 4, (0, 1), HOSTILE, HOSTILE, HOSTILE, [1] * 18, [[3.0, 0.1]])
    outcomes = [
        Outcome(unit, "failed", HOSTILE, [finding], [HOSTILE]),
        Outcome(sample_report.unit("torch", "gemm", 2), "not_claimed", HOSTILE),
    ]
    report = sample_report.report(outcomes)
    report.environment["device"] = HOSTILE
    page.save(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Page(text)
    assert found.elements.count("script") == 1 and "img" not in found.elements and "b" not in found.attributes
    assert "onerror" not in dict(found.attributes) and "<script>alert" not in text
    assert "{{ 7 * 7 }}" in found.text and "49" not in found.text
    assert report.reproducer(outcomes[0]) in found.commands
    assert "<" not in re.sub("`[^`]*`", "", markdown.render(report))  # between backticks HTML is text
    junit.save(report, tmp_path / "report.xml")
    ElementTree.parse(tmp_path / "report.xml")
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


def test_what_dispatch_refuses_stands_in_every_file(tmp_path):
    report = sample_report.report([Outcome(sample_report.unit("torch", "gemm", 2), "passed", "")])
    assert report.ok
    report.refused = {"torch.mine": HOSTILE}
    assert not report.ok and f"torch.mine is refused: {HOSTILE}" in report.uncertified
    assert "torch.mine" in Page(page.render(report)).text and "torch.mine" in markdown.render(report)
    junit.save(report, tmp_path / "report.xml")
    [suite] = [s for s in ElementTree.parse(tmp_path / "report.xml").iter("testsuite") if s.get("failures") != "0"]
    assert suite.get("name") == "torch.mine refused" and len(suite) == 1
    assert "<script>" in suite[0].get("name")
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


@pytest.mark.parametrize("failures", (300, 10_000))
def test_ten_thousand_outcomes_make_a_small_page(failures):
    report = sample_report.whole(10_000, failures)
    text = page.render(report)
    assert len(text.encode()) < 5_000_000
    found = Page(text)
    commands = set(found.commands)
    assert all(report.reproducer(outcome) in commands for outcome in report.failures())
    assert text.count('class="heat"') <= 3 * summary.DETAILED


def test_every_failing_implementation_gets_details():
    report = sample_report.whole(2_000, 2_000)
    found = summary.summarize(report)
    detailed = {Unit.parse(unit).implementation for unit in found.detailed}
    assert detailed == {outcome.parsed.implementation for outcome in report.outcomes}
    assert len(found.detailed) <= summary.DETAILED


def test_passed_units_are_added_up(mixed):
    found = summary.summarize(mixed)
    for cell, group in found.cells:
        assert counts(cell.outcomes)["passed"] == sum(one.counts["passed"] for one in group)
        for one in group:
            mine = [o for o in cell.outcomes if o.parsed.implementation == one.id]
            passed = [o for o in mine if o.state == "passed"]
            elements = sum(sum(f.histogram) for o in passed for f in o.findings)
            assert sum(one.histogram) == elements
            assert {check: sum(c[s] for s in page.STATES) for check, c in one.checks.items()} == {"values": len(mine)}
            nearest = max((o.ratio for o in passed), default=0.0)
            assert (one.worst.ratio if one.worst else 0.0) == nearest
            assert one.failures == [o for o in mine if failed(o)]


@pytest.mark.parametrize("asked, word, sentence", (
    ([], "nothing claimed", "nothing is certified"),
    (["not_claimed"], "nothing claimed", "nothing is certified"),
    (["passed", "not_claimed"], "passed", "All 1 claimed cases passed"),
    (["passed", "expected_failure"], "passed", "Of 2 claimed cases 1 fail as the vendor's file says"),
    (["passed", "unexpected_pass"], "failed", "1 of 2 claimed cases failed"),
    (["passed", "failed"], "failed", "1 of 2 claimed cases failed"),
))  # fmt: skip
def test_the_verdict(asked, word, sentence):
    outcomes = [Outcome(sample_report.unit("acme", "gemm", n), state, "why") for n, state in enumerate(asked)]
    report = sample_report.report(outcomes)
    found = Page(page.render(report))
    assert (word == "passed") == report.ok
    assert word in found.text and sentence in found.text


def test_part_of_a_run_says_so():
    outcome = Outcome(sample_report.unit("acme", "gemm", 1), "passed")
    asked = {"shard": (2, 4), "operators": ("gemm",), "checks": ("values",), "implementations": ("acme.gemm_v1",)}
    text = " ".join(Page(page.render(sample_report.report([outcome], **asked))).text.split())
    assert "only part 2 of 4" in text and "only operators gemm" in text and "only checks values" in text
    assert "only acme.gemm_v1" in text


@pytest.mark.parametrize("ratio, name", (
    (0.0, "s0"), (2.0**-9, "s1"), (2.0**-8, "s1"), (0.05, "s2"), (0.25, "s3"), (0.5, "s4"), (0.51, "s5"), (1.0, "s5"),
))  # fmt: skip
def test_cells_are_coloured_by_their_worst_ratio(ratio, name):
    unit = sample_report.unit("acme", "gemm", 1)
    findings = [Finding("result", True, "within", ratio), Finding("amax", True, "within", 0.0)]
    assert drawing.shade(Cell("gemm", "acme", (Outcome(unit, "passed", findings=findings),))) == name
    assert drawing.shade(Cell("gemm", "acme", (Outcome(unit, "failed", findings=findings),))) == "failed"
    assert drawing.shade(Cell("gemm", "acme", (Outcome(unit, "not_claimed"),))) == "not_claimed"


def test_heat_maps_keep_the_ratio_to_a_quarter_of_a_power_of_two():
    rows = [[0.0, 2.0**-30, 0.37, 1.0], [5.0, 2.0**20, 2.0**25, math.inf]]
    text = drawing.heat(rows)
    assert [len(row) for row in text.split(".")] == [4, 4]
    back = [drawing.ALPHABET.index(letter) for letter in text.replace(".", "")]
    assert back[0] == 0 and back[1] == 1 and back[5] == back[6] == back[7] == 63
    for place, ratio in ((2, 0.37), (3, 1.0), (4, 5.0)):
        assert abs((back[place] - 1) / 2 - 11 - math.log2(ratio)) <= 0.25
    assert drawing.worst_tile(rows) == (1, 3, math.inf)


def test_bars_stand_on_the_right_side_of_the_bound():
    empty = [0] * (len(HISTOGRAM) + 1)
    for place in range(len(empty)):
        histogram = [*empty]
        histogram[place] = 7
        (bar,) = drawing.bars(histogram)
        # The bin at place p ends at HISTOGRAM[p]; the last one has no end.
        assert bar.beyond == (place == len(HISTOGRAM) or HISTOGRAM[place] > 0)
        assert bar.label.startswith("7 elements") and bar.y + bar.height == drawing.BAR_HEIGHT
    assert drawing.sparkline(empty) == ""


def _luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ("light", "dark"))
def test_text_stands_out_from_its_ground(theme):
    style = (Path(page.__file__).parent / "style.jinja").read_text()
    block = style.split(f"macro {theme}()")[1].split("endmacro")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    grounds = {
        "text": ("ground", "surface", "raised", "bad-soft", "good-soft"),
        "quiet": ("ground", "surface", "raised"),
        "accent": ("ground", "surface"),
        "bad": ("ground", "surface", "bad-soft"),
        "good": ("ground", "surface", "good-soft"),
        "bad-text": ("bad-fill",),
        "surface": ("good", "quiet"),
        "ink0": ("s0", "s1", "s2", "s3"),
        "ink4": ("s4",),
        "ink5": ("s5",),
    }
    for ink, places in grounds.items():
        for ground in places:
            darker, lighter = sorted(_luminance(colours[name]) for name in (ink, ground))
            contrast = (lighter + 0.05) / (darker + 0.05)
            assert contrast >= 4.5, f"{ink} on {ground}: {contrast:.2f}"  # WCAG 2, level AA


@pytest.mark.parametrize("ratio, text", (
    (0.0, "0"), (0.0004, "4e-4"), (0.312, "0.31"), (0.9999, "0.99"), (1.0, "1"), (1.0001, "1.1"), (1.23, "1.2"),
    (12.3, "12"), (3.2e7, "3e7"), (math.inf, "∞"),
))  # fmt: skip
def test_ratios_are_short(ratio, text):
    assert drawing.short(ratio) == text


def test_the_report_folder_is_shipped():
    """The templates are data of the package: a wheel without them would fail only when a run has ended."""
    folder = Path(page.__file__).parent
    names = {path.name for path in folder.glob("*.jinja")}
    assert {"page.html.jinja", "parts.jinja", "style.jinja", "script.jinja"} <= names
    assert {path.suffix for path in folder.iterdir() if path.is_file()} <= {".py", ".jinja"}
