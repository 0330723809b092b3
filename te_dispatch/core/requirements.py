# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Requirements: the conditions of an implementation, and of a policy rule's ``when``, as data.

A condition compares one fact with a constant. It answers with a `Verdict`: it holds, it fails with a phrase that says
why, or it cannot be told because the fact is unknown. Conditions say which facts they read, so that the runtime can
build a key from exactly those, and numeric ones compile to a Python expression, so that a key holds the truth of
``k % 16 == 0`` rather than every ``k`` ever seen.

A fact name that starts with ``device.`` is read off the device, any other off the call.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

from te_dispatch.core.facts import UNKNOWN, CallFacts, DeviceFacts, FactValue, arch_number, read_call

DEVICE_PREFIX = "device."


@dataclass(frozen=True)
class Verdict:
    """The outcome of a condition: `holds` is None where a fact is unknown; `reason` says why it does not hold."""

    holds: bool | None
    reason: str = ""


HOLDS = Verdict(True)


def read_fact(name: str, call: CallFacts, device: DeviceFacts, condition: object = None) -> FactValue:
    """A device's fact, or a call's; `condition` is given by those that compile to an expression over the fact."""
    if name.startswith(DEVICE_PREFIX):
        return device[name[len(DEVICE_PREFIX) :]]
    return read_call(call, name, condition)


def _show(value: FactValue) -> str:
    return "not given" if value is None else str(value)


def _named(fact: object) -> None:
    if not isinstance(fact, str) or not fact:
        raise ValueError(f"the first argument of a condition is the name of a fact, got {fact!r}")


def _accepted(fact: str, values: tuple[FactValue, ...]) -> tuple[FactValue, ...]:
    """The values a condition compares with: vendors in lower case, as `DeviceFacts` has them."""
    _named(fact)
    if not values:
        raise ValueError(f"{fact}: a condition needs at least one value to compare with")
    for value in values:
        if value is not None and not isinstance(value, (str, bool, int, float)):
            raise ValueError(f"{fact}: compares with a str, bool, int, float or None, got {value!r}")
    if fact == "device.vendor":
        return tuple(v.lower() if isinstance(v, str) else v for v in values)
    return values


@dataclass(frozen=True)
class _Listed:
    """A condition that lists values of one fact."""

    fact: str
    values: tuple[FactValue, ...]

    def __init__(self, fact: str, *values: FactValue) -> None:
        object.__setattr__(self, "fact", fact)
        object.__setattr__(self, "values", _accepted(fact, values))

    def reads(self) -> frozenset[str]:
        return frozenset((self.fact,))


class OneOf(_Listed):
    """The fact equals one of `values`; a fact that is a tuple (``device.encodings``) contains one of them."""

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        value = read_fact(self.fact, call, device)
        if value is UNKNOWN:
            return Verdict(None, f"{self.fact} is unknown")
        # bool and int compare equal in Python; an option of True must not match a required 1.
        found = value if isinstance(value, tuple) else (value,)
        if any(type(v) is type(w) and v == w for v in found for w in self.values):
            return HOLDS
        wanted = " or ".join(_show(v) for v in self.values)
        return Verdict(False, f"{self.fact} is {_show(value)}, needs {wanted}")

    def describe(self) -> str:
        return f"{self.fact} is " + " or ".join(_show(v) for v in self.values)


class NoneOf(_Listed):
    """The fact equals none of `values`."""

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        verdict = OneOf(self.fact, *self.values).check(call, device)
        if verdict.holds is None:
            return verdict
        if verdict.holds:
            return Verdict(False, f"{self.fact} is {_show(read_fact(self.fact, call, device))}, which is not served")
        return HOLDS

    def describe(self) -> str:
        return f"{self.fact} is not " + " or ".join(_show(v) for v in self.values)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


def version_tuple(text: str) -> tuple[int, ...]:
    """``"9.10.2"`` -> ``(9, 10, 2)``, ``"9.0"`` -> ``(9,)``; what follows a part's number is ignored (``"3.6rc1"``)."""
    parts = []
    for part in text.split("."):
        match = re.match(r"\d+", part)
        if match is None:
            break
        parts.append(int(match.group()))
    while parts and parts[-1] == 0:
        parts.pop()  # 9.10 and 9.10.0 are one version
    return tuple(parts)


@dataclass(frozen=True)
class Compare:
    """The fact compares with `bound`: numbers by value, ``version.*`` facts as versions, ``device.arch`` by generation.

    Archs of different families do not compare: ``device.arch >= sm_90`` fails on ``gfx942`` and says so.
    """

    fact: str
    operator: str
    bound: Union[int, float, str]

    def __post_init__(self) -> None:
        if self.operator not in _COMPARE:
            raise ValueError(f"comparison must be one of {', '.join(_COMPARE)}, got {self.operator!r}")
        _named(self.fact)
        if isinstance(self.bound, bool) or not isinstance(self.bound, (int, float, str)):
            raise ValueError(f"{self.fact}: compares with an int, a float or a str, got {self.bound!r}")
        if isinstance(self.bound, float) and not math.isfinite(self.bound):
            raise ValueError(f"{self.fact}: compares with a finite number, got {self.bound!r}")

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        value = read_fact(self.fact, call, device, self)
        if value is UNKNOWN:
            return Verdict(None, f"{self.fact} is unknown")
        holds = self._holds(value)
        if holds:
            return HOLDS
        return Verdict(False, f"{self.fact} is {_show(value)}, needs {self.operator} {self.bound}")

    def _holds(self, value: FactValue) -> bool:
        compare = _COMPARE[self.operator]
        if isinstance(self.bound, str):
            if not isinstance(value, str):
                return False
            if self.fact == "device.arch":
                left, right = arch_number(value), arch_number(self.bound)
                if left is None or right is None or left[0] != right[0]:
                    return False
                return bool(compare(left[1], right[1]))
            return bool(compare(version_tuple(value), version_tuple(self.bound)))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return bool(compare(value, self.bound))

    def expression(self, variable: str) -> str:
        return f"{variable} {self.operator} {self.bound!r}"

    def reads(self) -> frozenset[str]:
        return frozenset((self.fact,))

    def describe(self) -> str:
        return f"{self.fact} {self.operator} {self.bound}"


@dataclass(frozen=True)
class MultipleOf:
    """The fact, a size, is a multiple of `factor`."""

    fact: str
    factor: int

    def __post_init__(self) -> None:
        _named(self.fact)
        if isinstance(self.factor, bool) or not isinstance(self.factor, int):
            raise ValueError(f"{self.fact}: the factor of MultipleOf is a positive int, got {self.factor!r}")
        if self.factor < 1:
            what = "divides by zero" if self.factor == 0 else "has a factor below 1"
            raise ValueError(f"{self.fact}: '% {self.factor} == 0' {what}")

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        value = read_fact(self.fact, call, device, self)
        if value is UNKNOWN:
            return Verdict(None, f"{self.fact} is unknown")
        if isinstance(value, int) and not isinstance(value, bool) and value % self.factor == 0:
            return HOLDS
        return Verdict(False, f"{self.fact} is {_show(value)}, needs a multiple of {self.factor}")

    def expression(self, variable: str) -> str:
        if self.factor & (self.factor - 1) == 0:
            return f"not {variable} & {self.factor - 1}"  # cheaper than the remainder
        return f"{variable} % {self.factor} == 0"

    def reads(self) -> frozenset[str]:
        return frozenset((self.fact,))

    def describe(self) -> str:
        return f"{self.fact} % {self.factor} == 0"


@dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple[Condition, ...]

    def __init__(self, *parts: Condition) -> None:
        object.__setattr__(self, "parts", parts)

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        unknown: Verdict | None = None
        for part in self.parts:
            verdict = part.check(call, device)
            if verdict.holds is False:
                return verdict
            if verdict.holds is None and unknown is None:
                unknown = verdict
        return unknown or HOLDS

    def reads(self) -> frozenset[str]:
        return frozenset().union(*(part.reads() for part in self.parts))

    def describe(self) -> str:
        return " and ".join(part.describe() for part in self.parts)


@dataclass(frozen=True)
class AnyOf:
    """An OR-set: at least one part holds."""

    parts: tuple[Condition, ...]

    def __init__(self, *parts: Condition) -> None:
        if not parts:
            raise ValueError("AnyOf needs at least one part: with none it could never hold, and give no reason")
        object.__setattr__(self, "parts", parts)

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        verdicts = [part.check(call, device) for part in self.parts]
        if any(v.holds for v in verdicts):
            return HOLDS
        reason = "; or ".join(v.reason for v in verdicts)
        return Verdict(None if any(v.holds is None for v in verdicts) else False, reason)

    def reads(self) -> frozenset[str]:
        return frozenset().union(*(part.reads() for part in self.parts))

    def describe(self) -> str:
        return " or ".join(f"({part.describe()})" for part in self.parts)


@dataclass(frozen=True)
class OnVendor:
    """Conditions for one vendor's devices; holds on any other vendor's (compose with `OneOf("device.vendor", ...)`)."""

    vendor: str
    condition: Condition

    def __post_init__(self) -> None:
        object.__setattr__(self, "vendor", self.vendor.lower())

    def check(self, call: CallFacts, device: DeviceFacts) -> Verdict:
        if device.vendor != self.vendor:
            return HOLDS
        return self.condition.check(call, device)

    def reads(self) -> frozenset[str]:
        return self.condition.reads() | {"device.vendor"}

    def describe(self) -> str:
        return f"on {self.vendor}: {self.condition.describe()}"


Condition = Union[OneOf, NoneOf, Compare, MultipleOf, All, AnyOf, OnVendor]


def atoms(condition: Condition) -> list[Union[OneOf, NoneOf, Compare, MultipleOf]]:
    """The single-fact conditions inside a condition, in order."""
    if isinstance(condition, (All, AnyOf)):
        return [atom for part in condition.parts for atom in atoms(part)]
    if isinstance(condition, OnVendor):
        return [OneOf("device.vendor", condition.vendor), *atoms(condition.condition)]
    return [condition]


def condition_from_policy(name: str, value: Any) -> Condition:
    """Read one entry of a policy rule's ``when``: ``arch: sm_90``, ``dtype: [bf16, fp16]``, ``seqlen_q: ">= 512"``.

    Raises:
        ValueError: when the comparison cannot be read; the message says what is accepted.
    """
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name}: the list of accepted values is empty, so the rule can never match")
        return OneOf(name, *value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(>=|<=|>|<)\s*([^\s<>=%!]\S*)\s*", value)
        if match:
            # A version stays text: as a number, 9.10 would be less than 9.9.
            bound = match.group(2) if ".version." in f".{name}" else _number(match.group(2))
            return Compare(name, match.group(1), bound)
        match = re.fullmatch(r"\s*%\s*(\d+)\s*==\s*0\s*", value)
        if match:
            return MultipleOf(name, int(match.group(1)))
        if re.match(r"\s*[<>=%!]", value):
            raise ValueError(
                f"{name}: cannot read {value!r}; write '>= N', '> N', '<= N', '< N', '% N == 0' or a value"
            )
    return OneOf(name, value)


def _number(text: str) -> Union[int, float, str]:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
