# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A rule's ``when``: names become facts of the call or the device, values become conditions.

A condition that can never hold is refused here, because at run time it would only look like a rule that does not
match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from te_dispatch.core.facts import arch_number
from te_dispatch.core.policy.known import VERSION_PREFIX, Known, did_you_mean
from te_dispatch.core.requirements import DEVICE_PREFIX, Compare, Condition, MultipleOf, OneOf, condition_from_policy

_VENDOR = f"{DEVICE_PREFIX}vendor"
_ARCH = f"{DEVICE_PREFIX}arch"
_VERSION = f"{DEVICE_PREFIX}{VERSION_PREFIX}"
_NUMBER = (int, float)


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
) -> Condition:
    """One entry of ``when``.

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
        value = list(texts) if isinstance(value, list) else texts[0]
    if fact == _VENDOR:
        value = [_lower(v) for v in value] if isinstance(value, list) else _lower(value)
    condition = condition_from_policy(fact, value)
    if isinstance(condition, MultipleOf) and condition.factor == 0:
        raise ValueError(f"{fact}: '% 0 == 0' divides by zero")
    if isinstance(condition, Compare) and fact.startswith(_VERSION):
        condition = dataclasses.replace(condition, bound=str(value).strip().lstrip("<>=").strip())
    if isinstance(condition, OneOf):
        for single in condition.values:
            _check_value(fact, single, operators, known, optional)
    else:
        _check_comparison(fact, condition, operators, known)
    return condition


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


def _check_value(fact: str, value: Any, operators: Iterable[str], known: Known, optional: Collection[str]) -> None:
    if fact == _VENDOR:
        problem = known.vendor_problem(str(value), optional)
        if problem:
            raise ValueError(problem)
        return
    kind = _kind(fact, operators, known)
    if value is None:
        return  # "not given"
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
    elif not fact.startswith(_VERSION) and not isinstance(condition.bound, _NUMBER):
        raise ValueError(f"{fact}: compares with a number, got {condition.bound!r}")
