# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A rule's ``when``: names become facts of the call or the device, values become conditions.

A condition that can never hold is refused here, because at run time it would only look like a rule that does not
match.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from te_dispatch.core.facts import arch_number
from te_dispatch.core.policy.known import VERSION_PREFIX, Known, did_you_mean
from te_dispatch.core.requirements import DEVICE_PREFIX, Compare, Condition, MultipleOf, OneOf, condition_from_policy

_VENDOR = f"{DEVICE_PREFIX}vendor"
_ARCH = f"{DEVICE_PREFIX}arch"
_VERSION = f"{DEVICE_PREFIX}{VERSION_PREFIX}"
_NUMBER = (int, float)
_TYPE = f"{DEVICE_PREFIX}type"
_BOOLEANS = frozenset((f"{DEVICE_PREFIX}fp8_matmul",))
_NUMBERS = frozenset(f"{DEVICE_PREFIX}{name}" for name in ("index", "memory", "warp_size"))


def fact_name(name: str, operators: Iterable[str], known: Known) -> str:
    """The fact a name in ``when`` stands for: of the call if it has one of that name, else of the device.

    Raises:
        ValueError: no operator the rule speaks of has it, and no device.
    """
    call = {fact for operator in operators for fact in known.facts.get(operator, ())}
    if name in call:
        return name
    bare = name.removeprefix(DEVICE_PREFIX)
    if bare in known.device_facts or (bare.startswith(VERSION_PREFIX) and len(bare) > len(VERSION_PREFIX)):
        return DEVICE_PREFIX + bare
    valid = call | known.device_facts | {DEVICE_PREFIX + fact for fact in known.device_facts}
    raise ValueError(f"unknown fact {name!r}{did_you_mean(name, valid, listing=False)}")


def read_condition(
    fact: str, value: Any, texts: list[str], operators: Iterable[str], known: Known, optional: Collection[str]
) -> tuple[Condition, ...]:
    """One entry of ``when``, as conditions that must all hold.

    Args:
        fact: as `fact_name` gave it.
        value: a scalar, a list of scalars, or a comparison such as ``">= 512"``.
        texts: the scalars as they are written; a version is its text (9.10 is not 9.1).
        operators: those the rule speaks of.
        known: words of this machine.
        optional: backends that may be absent.

    Raises:
        ValueError: it cannot be read, or can never hold.
    """
    if fact.startswith(_VERSION):
        return _version_conditions(fact, texts[0], isinstance(value, list))
    if fact == _VENDOR:
        value = [_lower(v) for v in value] if isinstance(value, list) else _lower(value)
    if _words(fact, operators, known) == {False, True}:
        # Whether an operand is given: null says that it is not.
        given = [False if one is None else one for one in (value if isinstance(value, list) else [value])]
        value = given if isinstance(value, list) else given[0]
    condition = condition_from_policy(fact, value)
    if isinstance(condition, OneOf):
        for single in condition.values:
            _check_value(fact, single, operators, known, optional)
    else:
        _check_comparison(fact, condition, operators, known)
    return (condition,)


def _version_conditions(fact: str, text: str, listed: bool) -> tuple[Condition, ...]:
    """A version and everything released of it (9.10 is 9.10.2 too), or a comparison."""
    library = fact.removeprefix(_VERSION)
    if listed:
        raise ValueError(f"{fact}: takes one version or comparison, not a list; write a rule for each version")
    condition = condition_from_policy(fact, text)
    if isinstance(condition, Compare):
        bound = text.strip().lstrip("<>=").strip()
        _check_version(library, bound)
        return (dataclasses.replace(condition, bound=bound),)
    if isinstance(condition, MultipleOf):
        raise ValueError(f"{fact}: a version has no multiples; write '>= 9.10'")
    _check_version(library, text)
    *head, last = re.match(r"\d+(\.\d+)*", text).group().split(".")  # type: ignore[union-attr]  # just checked
    return (Compare(fact, ">=", text), Compare(fact, "<", ".".join([*head, str(int(last) + 1)])))


def _check_version(library: str, text: str) -> None:
    if not re.match(r"\d", text):
        raise ValueError(f"version.{library}: {text!r} is no version: it must start with a digit, as 9.10 does")


def check_archs(conditions: Iterable[Condition], known: Known) -> None:
    """An arch must be one of the vendors that the same ``when`` accepts.

    Raises:
        ValueError: it is not.
    """
    single = [c for c in conditions if isinstance(c, OneOf)]
    vendors = {str(v) for c in single if c.fact == _VENDOR for v in c.values}
    for condition in single:
        if condition.fact == _ARCH:
            for arch in condition.values:
                problem = known.arch_problem(str(arch), vendors)
                if problem:
                    raise ValueError(problem)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _kind(fact: str, operators: Iterable[str], known: Known) -> str:
    """The kind all the operators that have the fact agree on, else ``option``."""
    kinds = {known.facts[o][fact] for o in operators if fact in known.facts.get(o, ())}
    return kinds.pop() if len(kinds) == 1 else "option"


def _words(fact: str, operators: Iterable[str], known: Known) -> frozenset[str | bool | None]:
    """What the fact can be in any of the operators that have it; empty where one of them does not say."""
    having = [o for o in operators if fact in known.facts.get(o, ())]
    said = [known.words.get(o, {}).get(fact, ()) for o in having]
    return frozenset(word for words in said for word in words) if all(said) else frozenset()


def _check_value(fact: str, value: Any, operators: Iterable[str], known: Known, optional: Collection[str]) -> None:
    if fact == _VENDOR:
        problem = known.vendor_problem(str(value), optional)
        if problem:
            raise ValueError(problem)
        return
    kind = _kind(fact, operators, known)
    if value is None and not fact.startswith(DEVICE_PREFIX):
        return  # "not given"
    if fact == _TYPE:
        _check_type(value, known)
    elif fact in _BOOLEANS and not isinstance(value, bool):
        raise ValueError(f"{fact}: must be true or false, got {value!r}")
    elif fact in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{fact}: must be a whole number or a comparison such as '>= 32', got {value!r}")
    words = _words(fact, operators, known)
    if words and not any(type(value) is type(word) and value == word for word in words):
        if True in words:
            raise ValueError(f"{fact}: must be true or false, got {value!r}")
        texts = [word for word in words if isinstance(word, str)]
        raise ValueError(f"{fact}: can never be {value!r}{did_you_mean(str(value), texts)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{fact}: must be finite, got {value!r}")
    if kind == "dtype" or fact == f"{DEVICE_PREFIX}encodings":
        if value not in known.dtypes:
            raise ValueError(f"{fact}: unknown dtype {value!r}{did_you_mean(str(value), known.dtypes, listing=False)}")
    elif kind == "size" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{fact}: a size is a whole number or a comparison such as '>= 512', got {value!r}")


def _check_comparison(fact: str, condition: Condition, operators: Iterable[str], known: Known) -> None:
    kind = _kind(fact, operators, known)
    if kind == "dtype" or fact == _VENDOR:
        raise ValueError(f"{fact}: has no order; write a value or a list of values")
    if not isinstance(condition, Compare):
        return
    if fact == _ARCH:
        if not isinstance(condition.bound, str) or arch_number(condition.bound) is None:
            raise ValueError(f"{fact}: {str(condition.bound)!r} has no number to compare archs by")
    elif not isinstance(condition.bound, _NUMBER):
        raise ValueError(f"{fact}: compares with a number, got {condition.bound!r}")
    elif not math.isfinite(condition.bound):
        raise ValueError(f"{fact}: compares with a finite number, got {condition.bound!r}")


def _check_type(value: Any, known: Known) -> None:
    """Types of plugins' devices are unknown words; what only looks like a slip is refused."""
    if value in known.device_types:
        return
    hint = did_you_mean(str(value).lower(), known.device_types, listing=False)
    if hint or not isinstance(value, str):
        raise ValueError(f"{_TYPE}: unknown device type {value!r}{hint}")
