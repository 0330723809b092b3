# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is checked of an implementation. One module per kind of behaviour, with its checks in ``CHECKS``.

To add a check: a function that takes a `Trial` and raises `Failure`, and a `Check` in the module's ``CHECKS`` that says
where it applies. A new module is listed in `_MODULES`.

Start with `values`. May import what `te_dispatch.conformance` may, and of the kit what a trial is made of; nothing that
plans or runs units, but `isolation.announce`.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from te_dispatch.conformance.coverage import Operand
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
        calls: whether the implementation serves a call in every unit that passes. Of a check that asks something else,
            and of one of errors, a unit passes without.
        claim: the claim of a manifest that it judges, if it judges one.
        each_operand: its cases are the plainest that have each operand twice, not the most different ones.
        of_forms: whether it gets, beyond `full`, a case of each form that a space's operands have (`Space.forms`).
        shows: whether a call with these operands has anything for it to see. Others are chosen where there is none.
    """

    name: str
    run: Callable[[Trial], None]
    applies: Callable[[Subject, Space], str | None]
    smoke: int | None
    full: int | None
    doc: str
    of_errors: bool = False
    calls: bool = True
    claim: str = ""
    each_operand: bool = False
    of_forms: bool = False
    shows: Callable[[Subject, Space, Mapping[str, Operand]], bool] | None = None


#: The modules of this package, in the order in which a run's checks follow one another.
_MODULES = (
    "values",
    "attributes",
    "capture",
    "causality",
    "concurrency",
    "defaults",
    "dropout",
    "failing",
    "gradients",
    "guarded",
    "layout",
    "memoized",
    "mistaken",
    "nonfinite",
    "placement",
    "planned",
    "refusing",
    "renewed",
    "repeatability",
    "rounding",
    "saved",
    "sharing",
    "spelled",
)


@functools.cache
def checks() -> Sequence[Check]:
    """All of them, `values` first. The order is the same in every process, so that shards are parts of one plan.

    Raises:
        ValueError: two have the same name.
    """
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    found: tuple[Check, ...] = tuple(itertools.chain.from_iterable(module.CHECKS for module in modules))
    for name, times in collections.Counter(check.name for check in found).items():
        if times > 1:
            raise ValueError(f"check {name} is defined {times} times")
    return found


def find(name: str) -> Check:
    """A check by name.

    Raises:
        ValueError: there is none; lists all.
    """
    for check in checks():
        if check.name == name:
            return check
    raise ValueError(f"check: got {name!r}, expected one of: {', '.join(check.name for check in checks())}")


def anywhere(subject: Subject, space: Space) -> str | None:
    """`Check.applies` of a check that always does."""
    return None
