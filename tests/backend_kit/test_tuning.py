# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is chosen of what was timed, kept and told. Times are made up: those of a GPU are `tests/gpu`'s."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import tuning
from te_dispatch.backend_kit.tuning import Candidate
from te_dispatch.core.errors import Declined


@pytest.mark.parametrize(
    ("medians", "noise", "winner"),
    [
        ([10.0], 0.0, 0),
        ([10.0, 9.0, 8.0], 0.0, 2),
        ([10.0, 8.05, 8.0], 0.0, 1),  # within 1% they are equal: the earlier in the list
        ([10.0, 9.2, 9.0], 0.01, 2),
        ([10.0, 9.95, 12.0], 0.0, 0),  # no gain worth a change
        ([10.0, 9.0, 12.0], 0.2, 0),  # less than noise
        ([10.0, float("inf"), 7.0], 0.0, 2),
        ([9.0, 10.0], 0.01, 0),
    ],
)
def test_the_choice_is_the_same_wherever_times_are_equal(medians: list[float], noise: float, winner: int) -> None:
    assert tuning.choose(medians, noise) == winner


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in name."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def taking(*us: float) -> Callable[[], float]:
    """A run whose rounds take these microseconds, the last of them from then on."""
    left = list(us)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def candidates(call: Mapping[str, Any], device: int) -> tuple[str, list[Candidate]]:
    if call["m"] == 0:
        return "", []
    if call["m"] == 1:
        raise Declined("one row is no product")
    if call["m"] == 2:
        raise ValueError("two rows are none either")
    if call["m"] == 3:
        return "three", [Candidate({}, "first", None), Candidate({}, "second", taking(1.0))]
    slow, fast = taking(500.0, 10.0), taking(1.0, 8.0)  # the first round, which warms up, does not count
    return f"key {call['m']}", [
        Candidate({"name": "a"}, "the first", slow),
        Candidate({"name": "b"}, "one that fails", None),
        Candidate({"name": "c"}, "the fastest", fast),
    ]


def test_winners_are_kept_and_told(device: None) -> None:
    kept: list[Any] = []
    told: list[tuple[int, Any]] = []
    calls = [{"m": m} for m in (5, 0, 1, 2, 3, 6)]
    rows = tuning.tune(calls, 0, candidates, kept.append, lambda place, row: told.append((place, row)))
    won = {"problem": None, "candidates": 3, "first_us": 10.0, "best_us": 8.0, "gain": 0.25, "place": 2}
    assert rows[0] == {"m": 5, **won, "algorithm": "the fastest"} and rows[5]["place"] == 2
    assert [row["problem"] for row in rows[1:5]] == [
        "nothing to multiply", "one row is no product", "two rows are none either",
        "first: the default does not run here",
    ]  # fmt: skip
    assert told == list(enumerate(rows))
    entry = {"name": "c", "first_us": 10.0, "best_us": 8.0}
    assert kept == [{"key 5": entry, "key 6": entry}]


def test_nothing_is_written_where_nothing_was_timed(device: None) -> None:
    kept: list[Any] = []
    tuning.tune([{"m": 1}], 0, candidates, kept.append)
    assert tuning.tune([{"m": 5}], 1, candidates, kept.append)[0]["problem"] == "PyTorch sees no device 1"
    assert not kept


def test_a_stream_that_is_captured_is_refused(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured into a graph"):
        tuning.tune([{"m": 5}], 0, candidates, lambda kept: None)


def test_operands_take_turns() -> None:
    assert tuning.sets_of(0) == 64 and tuning.sets_of(tuning.ROTATED_BYTES) == 2 and tuning.sets_of(1 << 24) == 16
