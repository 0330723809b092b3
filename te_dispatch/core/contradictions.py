# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Requirements that no call on any device can meet together.

Each condition speaks of one fact, so what must hold together is decided fact by fact: a list of values, or the values
that the operator declares, is tried value by value; sizes, versions and archs by their ranges. Alternatives (`AnyOf`,
`OnVendor`) are tried one after the other. Where that would take long, or nothing is known of a fact's values, the
requirements count as possible.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Union

from te_dispatch.core.facts import FactValue, arch_number
from te_dispatch.core.operator import Fact
from te_dispatch.core.requirements import (
    DEVICE_PREFIX,
    All,
    AnyOf,
    Compare,
    Condition,
    MultipleOf,
    NoneOf,
    OneOf,
    OnVendor,
    version_tuple,
)

Atom = Union[OneOf, NoneOf, Compare, MultipleOf]

_VERSION = f"{DEVICE_PREFIX}version."
_ARCH = f"{DEVICE_PREFIX}arch"
_DEVICE_SIZES = tuple(f"{DEVICE_PREFIX}{name}" for name in ("index", "memory", "warp_size"))
_DEVICE_WORDS = tuple(f"{DEVICE_PREFIX}{name}" for name in ("type", "vendor", "arch", "name", "fp8_matmul"))
#: Alternatives that are tried of one implementation.
_MOST = 1000


def contradiction(requires: Sequence[Condition], facts: Mapping[str, Fact]) -> str | None:
    """Why an implementation's requirements can never hold together, in words, or None.

    Args:
        requires: conditions, all of which must hold.
        facts: of the operator.
    """
    return _Search(facts).conflict(requires, {})


class _Search:
    def __init__(self, facts: Mapping[str, Fact]) -> None:
        self._facts = facts
        self._left = _MOST

    def conflict(self, conditions: Iterable[Condition], held: Mapping[str, tuple[Atom, ...]]) -> str | None:
        """Why `conditions` cannot hold together with `held`, whose conditions can."""
        atoms: dict[str, tuple[Atom, ...]] = dict(held)
        alternatives: list[AnyOf | OnVendor] = []
        waiting = list(conditions)
        added = []
        while waiting:
            one = waiting.pop(0)
            if isinstance(one, All):
                waiting[:0] = one.parts
            elif isinstance(one, (AnyOf, OnVendor)):
                alternatives.append(one)
            else:
                atoms[one.fact] = (*atoms.get(one.fact, ()), one)
                added.append(one.fact)
        for fact in dict.fromkeys(added):
            if self._impossible(fact, atoms[fact]):
                told = " and ".join(repr(atom.describe()) for atom in atoms[fact])
                return f"requires {told}, which " + ("never hold together" if atoms[fact][1:] else "never holds")
        if not alternatives:
            return None
        problem = None
        for branch in _branches(alternatives[0]):
            self._left -= 1
            problem = self.conflict((branch, *alternatives[1:]), atoms)
            if problem is None or self._left < 0:
                return None
        return problem

    def _impossible(self, fact: str, atoms: tuple[Atom, ...]) -> bool:
        listed = [atom for atom in atoms if isinstance(atom, OneOf)]
        if len(atoms) == 1 and listed:
            return False  # what it lists is checked word by word
        candidates = self._candidates(fact, listed)
        if candidates is not None:
            return not any(all(_holds(atom, value) for atom in atoms) for value in candidates)
        if listed:  # a fact that may hold several values has one of each list, and none of what is excluded
            others = [atom for atom in atoms if isinstance(atom, NoneOf)]
            return not all(any(all(_holds(o, v) for o in others) for v in one.values) for one in listed)
        if self._is_size(fact):
            return not _has_size(atoms)
        return _is_empty(fact, [atom for atom in atoms if isinstance(atom, Compare)])

    def _candidates(self, fact: str, listed: Sequence[OneOf]) -> Collection[FactValue] | None:
        """Values beside which the fact can have no other; None where that is not known."""
        declared = self._facts.get(fact)
        if declared is not None and declared.presence:
            return (False, True)
        if declared is not None and declared.boolean:
            return (None, False, True)
        if declared is not None and declared.words:
            return (*declared.words, None)
        single = (
            (declared is not None and declared.kind in ("dtype", "size"))
            or fact in (*_DEVICE_WORDS, *_DEVICE_SIZES)
            or fact.startswith(_VERSION)
        )  # fmt: skip
        return listed[0].values if listed and single else None

    def _is_size(self, fact: str) -> bool:
        return fact in _DEVICE_SIZES or (fact in self._facts and self._facts[fact].kind == "size")


def _branches(one: AnyOf | OnVendor) -> Iterable[Condition]:
    if isinstance(one, AnyOf):
        return one.parts
    vendor = f"{DEVICE_PREFIX}vendor"
    return (NoneOf(vendor, one.vendor), All(OneOf(vendor, one.vendor), one.condition))


def _holds(atom: Atom, value: FactValue) -> bool:
    device: Any = {atom.fact.removeprefix(DEVICE_PREFIX): value}
    return atom.check({atom.fact: value}, device).holds is True


def _has_size(atoms: Sequence[Atom]) -> bool:
    """Whether a whole number from 0 on meets the conditions, none of which lists what it accepts."""
    low: float = 0
    high = math.inf
    step = 1
    excluded: set[FactValue] = set()
    for atom in atoms:
        if isinstance(atom, MultipleOf):
            step = math.lcm(step, atom.factor)
        elif isinstance(atom, NoneOf):
            excluded.update(value for value in atom.values if type(value) is int)
        elif isinstance(atom, Compare):
            if isinstance(atom.bound, str):
                return False
            if atom.operator in (">", ">="):
                low = max(low, math.floor(atom.bound) + 1 if atom.operator == ">" else math.ceil(atom.bound))
            else:
                high = min(high, math.ceil(atom.bound) - 1 if atom.operator == "<" else math.floor(atom.bound))
    if high == math.inf:
        return True
    # One more multiple than there are excluded values suffices, however wide the range is.
    first = -(-int(low) // step) * step
    some = range(first, int(high) + 1, step)[: len(excluded) + 1]
    return not excluded.issuperset(some)


def _is_empty(fact: str, compared: Sequence[Compare]) -> bool:
    """Whether nothing lies within all bounds."""
    keys: list[Any] = [_key(fact, one.bound) for one in compared]
    if None in keys or len({type(key) is tuple for key in keys}) > 1:
        return False
    if fact == _ARCH and len({family for family, _ in keys}) > 1:
        return True  # archs of different families do not compare
    lows = [(key, one.operator == ">") for key, one in zip(keys, compared) if one.operator in (">", ">=")]
    highs = [(key, one.operator == "<") for key, one in zip(keys, compared) if one.operator in ("<", "<=")]
    return any(low > high or (low == high and (above or below)) for low, above in lows for high, below in highs)


def _key(fact: str, bound: Union[int, float, str]) -> Any:
    """What bounds of one fact are ordered by; None where they are not."""
    if not isinstance(bound, str):
        return bound
    return arch_number(bound) if fact == _ARCH else version_tuple(bound)
