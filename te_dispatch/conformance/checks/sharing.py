# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One tensor for several parameters, or several times in a list, that are only read: every operator allows that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.layout import movable
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.coverage import Operand
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Trial
from te_dispatch.core.memory import ANY, ROWS

#: Parameters that hold gradients.
GRADIENTS = ("dy", "dout", "add")


def shared(trial: Trial) -> None:
    """Operands of one shape and dtype, and items of a list, are one tensor: the first of them is given for all.

    A backward reads what its forward made of operands. Where that is not made anew, only gradients become another
    operand.
    """
    given = trial.arguments()
    operands = {name: Operand.of(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
    first_of = {
        name: other
        for name, other in _first_of(trial.subject, trial.space, operands).items()
        # Integers say where something is.
        if given[name].is_floating_point() or torch.equal(given[name], given[other])
    }
    lists = [name for name in _lists(trial.subject, trial.space) if Operand.of(given.get(name)).duplicates]
    if not lists and not any(given[name].numel() for name in first_of):
        trial.notes.append("no two operands are alike")
        return

    def change(given: Arguments) -> Arguments:
        shared = {name: given[first_of.get(name, name)] for name in given}
        return shared | {name: _firsts(given[name]) for name in lists}

    _judge(trial.with_values("shared", change))


def parts(trial: Trial) -> None:
    """The items of a list are parts of one tensor that begin where it begins."""
    given = trial.arguments()
    lists = [name for name in _lists(trial.subject, trial.space) if Operand.of(given.get(name)).unequal]
    if not lists:
        trial.notes.append("no list has items of several sizes")
        return
    _judge(trial.with_values("parts", lambda given: given | {name: _parts(given[name]) for name in lists}))


def _judge(trial: Trial) -> None:
    arguments = trial.on_device()
    trial.claim(arguments)
    result = trial.call(arguments)
    synchronize(trial)
    trial.judge(result, arguments)


def _read(subject: Subject) -> tuple[str, ...]:
    return tuple(name for name, form in subject.operator.memory.items() if form in (ANY, ROWS))


def _lists(subject: Subject, space: Space) -> tuple[str, ...]:
    """Parameters that may hold lists of which a forward, or another operator, reads the items."""
    kept = subject.operator.backward and space.forward is None
    return () if kept else _read(subject)


def _firsts(items: list[Any]) -> list[Any]:
    """The list with each floating-point tensor replaced by the first one of the same shape, strides and dtype."""
    found: dict[Operand, torch.Tensor] = {}
    numbers = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in items]
    return [found.setdefault(Operand.of(x), x) if known else x for x, known in zip(items, numbers)]


def _parts(items: list[Any]) -> list[Any]:
    """The list with each floating-point tensor replaced by the first elements of the largest one of its dtype, which
    begin at the same address."""
    numbers = [x for x in items if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_contiguous()]
    largest: dict[torch.dtype, torch.Tensor] = {}
    for x in sorted(numbers, key=torch.Tensor.numel):
        largest[x.dtype] = x
    made = {
        id(x): largest[x.dtype].view(-1)[: x.numel()].view(x.shape)
        for x in numbers
        if 0 < x.numel() < largest[x.dtype].numel()
    }
    return [made.get(id(x), x) for x in items]


def _first_of(subject: Subject, space: Space, operands: Mapping[str, Operand]) -> dict[str, str]:
    """Parameter -> an earlier one whose tensor has the same shape, strides and dtype.

    Gradients are considered last, and share the tensor of another gradient before that of any other parameter.
    """
    kept = subject.operator.backward and space.forward is None
    names = [name for name in sorted(_read(subject), key=GRADIENTS.__contains__) if name in operands]
    found: dict[str, str] = {}
    for place, name in enumerate(names):
        if operands[name].shape is None or (kept and name not in GRADIENTS):
            continue
        # Only a gradient has gradients before it.
        for other in sorted(names[:place], key=lambda other: other not in GRADIENTS):
            if other not in found and operands[other] == operands[name]:
                found[name] = other
                break
    return found


def _can_share(subject: Subject, space: Space, operands: Mapping[str, Operand]) -> bool:
    dtypes = [operands[name].dtype for name in _first_of(subject, space, operands)]
    lists = any(operands[name].duplicates for name in _lists(subject, space) if name in operands)
    return lists or any(dtype is not None and dtype.is_floating_point for dtype in dtypes)


def _applies(subject: Subject, space: Space) -> str | None:
    # One operand may be a list.
    return movable(subject, space) if _read(subject) else "reads no operand"


def _has_lists(subject: Subject, space: Space) -> str | None:
    parameters = subject.operator.parameters
    takes = any(member.depth for name in _lists(subject, space) for member in parameters[name].members)
    return movable(subject, space) if takes else "reads no list"


def _can_be_parts(subject: Subject, space: Space, operands: Mapping[str, Operand]) -> bool:
    return any(operands[name].unequal for name in _lists(subject, space) if name in operands)


CHECKS = (
    Check("shared", shared, _applies, 1, 2, "one tensor as several operands", of_forms=True, shows=_can_share),
    Check("parts", parts, _has_lists, 0, 2, "parts of one tensor as the items of a list", shows=_can_be_parts),
)
