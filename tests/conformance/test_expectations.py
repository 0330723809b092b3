# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Skip files and files of known failures: read strictly, matched literally."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.expectations import Expectations, Line, read
from te_dispatch.conformance.outcome import STATES, Outcome, failed
from te_dispatch.conformance.settings import UsageError

UNITS = [
    Unit.parse("acme.gemm/values/gemm.plain[dtype=bf16,shape=1x2]"),
    Unit.parse("acme.gemm/threads/gemm.plain[dtype=bf16,shape=1x2]"),
    Unit.parse("acme.gemm/values/gemm.plain[dtype=fp32,shape=1x2]#3"),
]


def _lines(tmp_path: Path, text: str) -> list[Line]:
    path = tmp_path / "file.txt"
    path.write_text(text, encoding="utf-8")
    return read(str(path))


def test_a_file_is_lines_of_pattern_and_reason(tmp_path: Path) -> None:
    found = _lines(tmp_path, f"# heading\n\n  # and more\n{UNITS[2].id}  # why #4 not\n*/threads/* # lock\n")
    assert [(line.pattern, line.reason) for line in found] == [(UNITS[2].id, "why #4 not"), ("*/threads/*", "lock")]
    assert [line.where.rpartition(":")[2] for line in found] == ["4", "5"]
    assert read(None) == []


@pytest.mark.parametrize("line", ["*", "* #", "* #  ", f"{UNITS[2].id}", "*#because"])
def test_a_line_without_a_reason_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"file.txt:2: .* has no reason; expected: pattern  # why"):
        _lines(tmp_path, f"# one\n{line}\n")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match=f"{path}: cannot be read"):
            read(str(path))
    (tmp_path / "latin").write_bytes(b"\xff\xfe*  # why\n")
    with pytest.raises(UsageError, match="latin: cannot be read"):
        read(str(tmp_path / "latin"))


_WORDS = st.text("ab1x.-", min_size=1, max_size=6)
_CASES = st.builds(
    Case,
    st.sampled_from(["gemm", "softmax_fwd"]),
    st.sampled_from(["plain", "quantized"]),
    st.lists(st.tuples(st.sampled_from(["m", "n", "values"]), _WORDS), max_size=3, unique_by=lambda a: a[0]).map(tuple),
    st.integers(0, 10**12),
)
_UNITS = st.builds(Unit, st.sampled_from(["acme.gemm", "torch.x"]), st.sampled_from(["values", "threads"]), _CASES)


@given(_UNITS)
def test_ids_read_back(unit: Unit) -> None:
    assert Unit.parse(unit.id) == unit
    assert Case.parse(unit.case.id) == unit.case


@given(_UNITS, _UNITS)
def test_an_id_is_a_pattern_that_matches_itself_alone(one: Unit, other: Unit) -> None:
    line = Line(one.id, "why", "f:1")
    assert line.matches(one.id) and line.matches(other.id) == (one == other)


@pytest.mark.parametrize(
    "text", ["", "gemm", "gemm.plain", "gemm[a=b]", "gemm.plain[a]", "gemm.plain[a=b]#x", "g.p[a=b]x"]
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected "):
        Case.parse(text)
    with pytest.raises(ValueError, match="expected "):
        Unit.parse(f"acme.gemm/values/{text}")


def test_stars_cross_everything_and_question_marks_one_character() -> None:
    assert all(Line("acme.*", "", "").matches(unit.id) for unit in UNITS)
    assert Line("*[dtype=*", "", "").matches(UNITS[0].id)
    assert Line("*dtype=????,*", "", "").matches(UNITS[2].id)
    assert not Line("*dtype=???,*", "", "").matches(UNITS[2].id)
    assert not Line("*[db]*type=x", "", "").matches(UNITS[0].id)


def test_a_pattern_may_match_in_the_whole_plan_only() -> None:
    line = Line(UNITS[2].id, "why", "f:1")
    Expectations((line,)).check(UNITS[:2], lambda: UNITS)
    with pytest.raises(UsageError, match=r"no unit matches \(a misspelt or stale pattern\): f:1: "):
        Expectations((line,)).check(UNITS[:2], lambda: UNITS[:2])


def test_every_stale_pattern_is_named() -> None:
    both = Expectations((Line("one*", "", "a:1"),), (Line("acme*", "", "b:1"), Line("two*", "", "b:2")))
    with pytest.raises(UsageError, match=r"a:1: one.*; b:2: two"):
        both.check(UNITS, lambda: UNITS)


def test_the_whole_plan_is_asked_for_only_where_it_is_needed() -> None:
    Expectations((Line("*", "", "a:1"),)).check(UNITS, lambda: pytest.fail("planned again"))


@pytest.mark.parametrize("state", STATES)
def test_outcomes_in_the_light_of_what_was_expected(state: str) -> None:
    expected = Expectations(fail=(Line("*/values/*", "no tanh", "f:1"),))
    became = expected.judged(Outcome(UNITS[0].id, state, "off by one"))
    assert became.state == {"passed": "unexpected_pass", "failed": "expected_failure"}.get(state, state)
    assert failed(became) == (state in ("passed", "unexpected_pass"))
    if state == "failed":
        assert became.message == "no tanh: off by one"
    if state == "passed":
        assert "f:1 expects a failure (no tanh): take the line out" in became.message
    other = Outcome(UNITS[1].id, state, "x")
    assert expected.judged(other) == other


def test_what_is_skipped_says_why() -> None:
    expected = Expectations(skip=(Line("*/threads/*", "lock", "f:9"),))
    assert expected.skipped(UNITS[0]) is None
    skipped = expected.skipped(UNITS[1])
    assert skipped is not None and (skipped.state, skipped.message) == ("skipped", "lock (f:9)")
