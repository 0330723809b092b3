# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is checked of an implementation. One module per kind of behaviour; each registers its checks here.

To add a check: a function that takes a `Trial` and raises `Failure`, and a `Check` that says where it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Trial


@dataclass(frozen=True)
class Check:
    """One question.

    Attributes:
        name: part of a unit's id.
        run: raises `Failure` where the answer is wrong, `NotClaimed` where the subject does not serve the call.
        applies: why there is nothing to check of a subject in a space; None where there is.
        smoke, full: cases per implementation and space at these levels; None for all of the level's cases, 0 for
            none at that level.
        doc: one phrase for reports.
        of_errors: for spaces whose calls must raise; all other checks are for those whose calls return.
        claim: the claim of a manifest that it judges, if it judges one.
        each_operand: its cases are the plainest that have each operand twice, not the most different ones.
        of_forms: whether it gets, beyond `full`, a case of each form that a space's operands have (`Space.forms`).
    """

    name: str
    run: Callable[[Trial], None]
    applies: Callable[[Subject, Space], str | None]
    smoke: int | None
    full: int | None
    doc: str
    of_errors: bool = False
    claim: str = ""
    each_operand: bool = False
    of_forms: bool = False


_checks: dict[str, Check] = {}


def register(*checks: Check) -> None:
    """Add checks.

    Raises:
        ValueError: a name is taken.
    """
    for check in checks:
        if check.name in _checks:
            raise ValueError(f"check {check.name} is registered twice")
        _checks[check.name] = check


def checks() -> Sequence[Check]:
    """All of them, `values` first."""
    _load()
    return tuple(_checks.values())


def find(name: str) -> Check:
    """A check by name.

    Raises:
        ValueError: there is none; lists all.
    """
    _load()
    if name not in _checks:
        raise ValueError(f"check: got {name!r}, expected one of: {', '.join(_checks)}")
    return _checks[name]


def anywhere(subject: Subject, space: Space) -> str | None:
    """`Check.applies` of a check that always does."""
    return None


def _load() -> None:
    from te_dispatch.conformance.checks import values  # noqa: F401, I001  # first: the one that every case gets
    from te_dispatch.conformance.checks import (  # noqa: F401
        attributes,
        capture,
        causality,
        concurrency,
        dropout,
        gradients,
        guarded,
        layout,
        memoized,
        nonfinite,
        placement,
        refusing,
        repeatability,
        saved,
        sharing,
    )
