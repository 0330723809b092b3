# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Caches of backends: bounded, counted, and cleared by whoever changes what their functions read."""

from __future__ import annotations

from te_dispatch.backend_kit import caches


def test_a_cached_function_answers_once_for_each_kind_of_call_and_is_counted() -> None:
    asked: list[tuple[int, str]] = []

    @caches.cached(2)
    def answer(x: int, word: str) -> int:
        asked.append((x, word))
        return x + len(word)

    (name,) = [name for name in caches.statistics() if name.endswith("<locals>.answer")]
    assert [answer(1, "a"), answer(1, "a"), answer(2, "a"), answer(1, "a"), answer(3, "a"), answer(2, "a")] == [
        2, 2, 3, 2, 4, 3,
    ]  # fmt: skip
    assert asked == [(1, "a"), (2, "a"), (3, "a"), (2, "a")]  # 2 was asked for least recently when 3 came
    assert caches.statistics()[name] == caches.CacheStatistics(2, 4, 2, 2, 2)
    caches.clear("another_package.")
    answer(2, "a")
    assert len(asked) == 4
    caches.clear(__name__)
    answer(2, "a")
    assert len(asked) == 5
