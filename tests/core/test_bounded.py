# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What keeps earlier calls has a bound, and drops one entry at a time."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_dispatch.core.bounded import BoundedDict, RecentDict


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_the_entry_that_was_set_first_goes(capacity: int, keys: list[int]) -> None:
    found: BoundedDict[int, int] = BoundedDict(capacity)
    expected: list[int] = []
    for number, key in enumerate(keys):
        found[key] = number
        if key not in expected:
            expected = [*expected, key][-capacity:]
        assert list(found) == expected and found[key] == number


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_bound(again: Any) -> None:
    found: BoundedDict[str, int] = BoundedDict(2)
    found["a"], found["b"] = 1, 2
    twin = again(found)
    twin["c"] = 3
    assert twin == {"b": 2, "c": 3} and found == {"a": 1, "b": 2}


def test_threads_may_set_at_once() -> None:
    found: BoundedDict[int, int] = BoundedDict(4)
    errors: list[BaseException] = []

    def fill(first: int) -> None:
        try:
            for i in range(20_000):
                found[first + i % 7] = i
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fill, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and 0 < len(found) <= 4 + len(threads)


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_entries_in_use_stay(half: int, steps: list[tuple[bool, int]]) -> None:
    """However many others are set: what was set or read among the last `half` different keys is there."""
    found: RecentDict[int, int] = RecentDict(2 * half)
    expected: dict[int, int] = {}
    used: list[int] = []
    for number, (setting, key) in enumerate(steps):
        if setting:
            found[key] = expected[key] = number
        else:
            value = found.get(key, -1)
            if value == -1:
                assert key not in used[-half:]
                continue
            assert value == expected[key] == found.recent[key]
        used = [*(one for one in used if one != key), key]
        assert found.size <= 2 * half
    for key in used[-half:]:
        assert found.get(key, -1) == expected[key]


def test_evictions_are_counted_and_clearing_is_none() -> None:
    found: RecentDict[int, int] = RecentDict(4)
    for i in range(10):
        found[i] = i
    assert found.evicted + found.size == 10 and found.size <= 4
    found.clear()
    assert found.size == 0 and found.get(9, -1) == -1
