# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Memory directly behind and before operands, which no kernel may read: not with a weight of 0, and not unused either.

On the CPU it lies in pages that are closed to every access, one operand's at a time, so a crash says whose. Each
operand lies in three ways: up to the closed page, at whatever element it then starts; from an address that vectors
want, with less than a vector of room before the closed page; and directly behind a closed page. On other devices what
lies around operands holds NaN and Inf, or the largest integer. The room that is left is filled so on the CPU, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_dispatch.conformance import arranging, pages
from te_dispatch.conformance.arranging import Allocate, Plan
from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.layout import called, movable
from te_dispatch.conformance.isolation import announce
from te_dispatch.conformance.transfer import tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.memory import SAVED, WRITTEN

#: Bytes of the widest vectors that are loaded at once.
_VECTOR = 64
#: Bytes around an operand on a device whose memory cannot be closed: some tiles of some rows.
_AROUND = 1 << 14


@dataclass(frozen=True)
class _Way:
    """One way to lay an operand.

    Attributes:
        side: of the operand that is guarded, in words.
        plan: where in its memory it lies.
        allocate: where that comes from.
    """

    side: str
    plan: Plan
    allocate: Allocate


def _exactly(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int]:
    """As much memory as there are elements."""
    return x.numel(), _dense(x), 0


def _aligned(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int]:
    """As much more as a vector at the end lacks."""
    return x.numel() + -x.numel() % (_VECTOR // x.element_size()), _dense(x), 0


def _amid(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int]:
    around = _AROUND // x.element_size()
    return 2 * around + x.numel(), _dense(x), around


def _dense(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(math.prod(x.shape[i + 1 :]) for i in range(x.dim()))


_CLOSED = (
    _Way("behind", _exactly, pages.before_closed_page),
    _Way("behind", _aligned, pages.before_closed_page),
    _Way("before", _aligned, pages.behind_closed_page),
)
_FILLED = (_Way("around", _amid, arranging.anywhere),)


def guarded(trial: Trial) -> None:
    """Operands with nothing readable behind or before them."""
    given = trial.on_device()
    trial.claim(given)
    memory = trial.subject.operator.memory
    named = {path.partition(".")[0]: None for path, tensor in tensors(dict(given)) if tensor.numel()}
    names = [name for name in named if memory.get(name, WRITTEN) != SAVED]
    refusals = {}
    for way in _CLOSED if pages.supported(trial.device) else _FILLED:
        for name in names:
            announce(f"guarded: a crash after this is an access {way.side} {name}")
            try:
                refusal = called(trial, way.plan, memory, arranging.only(name), given, way.allocate)
            except Failure as failure:
                raise Failure(f"with memory {way.side} {name} guarded: {failure}", failure.findings) from failure
            if refusal is not None:
                refusals[name] = refusal
    announce("guarded: done")
    trial.notes += [f"refuses {name} so: {refusal}" for name, refusal in refusals.items()]


CHECKS = (
    Check("guarded", guarded, movable, 1, 2, "operands with nothing readable behind or before them", of_forms=True),
)
