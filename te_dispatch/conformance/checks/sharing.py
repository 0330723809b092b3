# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One tensor for several parameters that are only read, which every operator allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.layout import movable
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Trial
from te_dispatch.core.memory import ANY, ROWS

#: Parameters that hold gradients.
_GRADIENTS = ("dy", "dout", "add")


def shared(trial: Trial) -> None:
    """Operands of one shape and dtype are one tensor: the first of them is given for all.

    A backward reads what its forward made of operands. Where that is not made anew, only gradients become another
    operand.
    """
    given, names = trial.arguments(), _read(trial.subject)
    kept = trial.subject.operator.backward and trial.space.forward is None
    first_of = _first_of(given, sorted(names, key=_GRADIENTS.__contains__), kept)
    if not first_of:
        trial.notes.append("no two operands are alike")
        return

    def change(given: Arguments) -> Arguments:
        return {name: given[first_of.get(name, name)] for name in given}

    other = trial.with_values("shared", change)
    arguments = other.on_device()
    other.claim(arguments)
    result = other.call(arguments)
    synchronize(other)
    other.judge(result, arguments)


def _read(subject: Subject) -> tuple[str, ...]:
    return tuple(name for name, form in subject.operator.memory.items() if form in (ANY, ROWS))


def _first_of(given: Arguments, names: Sequence[str], kept: bool) -> dict[str, str]:
    """Parameter -> the one before it whose tensor is alike. Integers say where something is, so they have to be equal.

    Args:
        kept: all but gradients stay what they are.
    """
    found: dict[str, str] = {}
    for name in names:
        x = given.get(name)
        if not isinstance(x, torch.Tensor) or not x.numel() or (kept and name not in _GRADIENTS):
            continue
        for other in names[: names.index(name)]:
            like = given.get(other)
            if other in found or not isinstance(like, torch.Tensor):
                continue
            alike = x.shape == like.shape and x.dtype == like.dtype and x.stride() == like.stride()
            if alike and (x.is_floating_point() or torch.equal(x, like)):
                found[name] = other
                break
    return found


def _applies(subject: Subject, space: Space) -> str | None:
    if len(_read(subject)) < 2:
        return "reads one operand only"
    return movable(subject, space)


CHECKS = (Check("shared", shared, _applies, 1, 2, "one tensor as several operands"),)
