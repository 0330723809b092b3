# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The journal of a conformance run: no interruption costs what it knew, and what it says is never dropped unsaid."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from te_dispatch.conformance.journal import known, opened
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.settings import Settings, UsageError

SETTINGS, ENVIRONMENT = Settings(), {"torch": "2.13"}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of 50 outcomes."""
    path = tmp_path / "journal.jsonl"
    with opened(path, SETTINGS, ENVIRONMENT, {}) as kept:
        for n in range(50):
            kept.add(Outcome(f"unit {n}", "passed"))
    return path


def _known(path: Path) -> list[str]:
    with opened(path, SETTINGS, ENVIRONMENT, known(path, SETTINGS, ENVIRONMENT)) as kept:
        return [f"unit {n}" for n in range(60) if kept.get(f"unit {n}") is not None]


@pytest.mark.parametrize(("owner", "name"), [(Path, "write_text"), (os, "replace")], ids=["writing", "replacing"])
def test_an_interruption_while_a_run_is_resumed_costs_nothing(
    owner: Any, name: str, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    before = journal.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        outcomes = known(journal, SETTINGS, ENVIRONMENT)
        with pytest.raises(KeyboardInterrupt), opened(journal, SETTINGS, ENVIRONMENT, outcomes):
            pass
    assert journal.read_text() == before
    assert len(_known(journal)) == 50


@pytest.mark.parametrize("behind", ["{", "}", ":", ","])
def test_a_last_line_may_be_cut_anywhere(behind: str, journal: Path) -> None:
    """Behind a nested brace too, where what is left looks like the end of an object."""
    whole = json.dumps({"unit": "unit 50", "state": "passed", "findings": [{"a": {"b": 1}, "c": 2}]})
    for at, letter in enumerate(whole):
        if letter == behind and at + 1 < len(whole):
            lines = journal.read_text().splitlines()[:51]
            journal.write_text("\n".join([*lines, whole[: at + 1]]))
            assert _known(journal) == [f"unit {n}" for n in range(50)]


def test_an_outcome_of_an_unknown_state_is_refused(journal: Path) -> None:
    with open(journal, "a") as file:
        file.write(json.dumps(Outcome("unit 50", "fine").as_data()) + "\n")
    with pytest.raises(UsageError, match="has an outcome of the state 'fine', expected one of passed, failed"):
        _known(journal)
