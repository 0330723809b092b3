# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Pairwise covering: every pair that any valid combination holds, the same on every machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.conformance.covering import pairwise, product

Axes = dict[str, tuple[str, ...]]
Forbidden = list[dict[str, str]]

_AXES = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(
    lambda sizes: {f"a{i}": tuple(f"v{j}" for j in range(size)) for i, size in enumerate(sizes)}
)


@st.composite
def _constrained(draw: st.DrawFn) -> tuple[Axes, Forbidden]:
    """Axes, and partial combinations (of one to three values) that are not allowed."""
    axes = draw(_AXES)
    rules = []
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, max_size=3, unique=True))
        rules.append({name: draw(st.sampled_from(axes[name])) for name in names})
    return axes, rules


def _valid(forbidden: Forbidden) -> Callable[[Mapping[str, str]], bool]:
    return lambda values: not any(all(values[n] == v for n, v in rule.items()) for rule in forbidden)


def _pairs(values: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(values.items(), 2))


@settings(deadline=None, max_examples=200)
@given(_constrained())
def test_every_feasible_pair_is_covered_by_valid_combinations(given_: tuple[Axes, Forbidden]) -> None:
    axes, forbidden = given_
    valid = _valid(forbidden)
    found = pairwise(axes, valid)
    every = list(product(axes, valid))
    assert all(list(values) == list(axes) and values in every for values in found)
    assert set().union(*map(_pairs, found)) == set().union(*map(_pairs, every))
    assert len(found) <= len(every) and len({tuple(v.items()) for v in found}) == len(found)
    assert bool(found) == bool(every)
    assert found == pairwise(axes, valid), "not the same twice"


@given(_AXES)
def test_the_first_is_the_plainest(axes: Axes) -> None:
    assert pairwise(axes, lambda values: True)[0] == {name: values[0] for name, values in axes.items()}


@given(_constrained())
def test_the_product_is_everything_that_is_valid(given_: tuple[Axes, Forbidden]) -> None:
    axes, forbidden = given_
    assert len(list(product(axes, lambda values: True))) == math.prod(map(len, axes.values()))
    kept = list(product(axes, _valid(forbidden)))
    assert kept == [values for values in product(axes, lambda values: True) if _valid(forbidden)(values)]


def test_it_is_far_smaller_than_the_product() -> None:
    axes = {f"a{i}": tuple("abcd") for i in range(10)}
    found = pairwise(axes, lambda values: True)
    assert 16 <= len(found) <= 4 * 16  # 16 pairs of any two axes; the product has 4^10


def test_a_predicate_may_ask_in_every_way_a_dict_allows() -> None:
    axes = {"m": ("1", "2"), "n": ("1", "2"), "out": ("new", "given")}

    def valid(values: Mapping[str, str]) -> bool:
        ordered = sorted(values.items())
        return (values.get("absent") is None and "m" in values and ordered[0][1] != "2") or values["out"] == "new"

    found, every = pairwise(axes, valid), list(product(axes, valid))
    assert set().union(*map(_pairs, found)) == set().union(*map(_pairs, every))


def test_a_rare_combination_behind_many_axes_is_found() -> None:
    """One pair that only one of 3^9 combinations holds."""
    axes = {f"a{i}": tuple("xyz") for i in range(9)}
    rare = dict.fromkeys(axes, "z")

    def valid(values: Mapping[str, str]) -> bool:
        return not (values["a0"] == "z" and values["a1"] == "z") or all(values[n] == v for n, v in rare.items())

    assert rare in pairwise(axes, valid)
