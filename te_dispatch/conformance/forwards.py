# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The forward that a backward goes with, and what the backward reads of its results."""

from __future__ import annotations

from typing import Any

from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.core.errors import Declined
from te_dispatch.core.operator import OPERATORS


class NotClaimed(Exception):
    """The implementation does not serve this call; the message is dispatch's reason."""


def complete(subject: Subject, space: Space, arguments: Arguments) -> Arguments:
    """A backward's arguments with `out`, `lse` and `saved` of the forward that it goes with.

    Raises:
        NotClaimed: no forward of this backward's kind serves the call, or it declines it.
    """
    assert space.forward is not None
    forward_arguments = space.forward(arguments)
    return behind(forward_of(subject, forward_arguments), forward_arguments, arguments)


def behind(forward: Subject, forward_arguments: Arguments, arguments: Arguments) -> Arguments:
    """A backward's arguments with `out`, `lse` and `saved` of a call of this forward.

    Raises:
        NotClaimed: the forward declines the call.
    """
    result = run_forward(forward, forward_arguments)
    return {**arguments, **{n: getattr(result, n) for n in ("out", "lse", "saved")}}


def run_forward(forward: Subject, forward_arguments: Arguments) -> Any:
    """The result of the forward that a backward goes with.

    Raises:
        NotClaimed: the forward declines the call.
    """
    try:
        return forward.call(forward_arguments)
    except Declined as declined:
        # Dispatch would give the call to another forward, and its backward to that one's.
        raise NotClaimed(f"its forward {forward.id} declined: {declined}") from declined


def forward_of(subject: Subject, forward_arguments: Arguments) -> Subject:
    """The forward that dispatch would bind together with this backward.

    Raises:
        NotClaimed: none serves the call.
    """
    assert subject.operator.companion is not None
    operator = OPERATORS[subject.operator.companion]
    for forward in subjects(subject.manager, operator, subject.device):
        claim = forward.claim(forward_arguments)
        if claim.refusal is None and claim.companion == subject.id:
            return forward
    raise NotClaimed(f"no forward that {subject.id} goes with serves this call")
