# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands that do not lie in memory of their own: rows apart, and starting at an odd element.

An operator's contract asks for a contiguous last dimension at most. An implementation that needs more refuses, before
it writes anything, with an error that names an argument or `Declined`; what it must not do is to read as if the rows
were adjacent.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.conformance.checks import Check, register
from te_dispatch.conformance.checks.values import changed_inputs, synchronize
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined

#: Elements between two rows of a strided operand: not a multiple of any vector width.
_GAP = 3


def _strided(x: torch.Tensor) -> torch.Tensor:
    """x with a gap behind every row of its last dimension; vectors and scalars stay as they are."""
    if x.dim() < 2:
        return x
    room = torch.full((*x.shape[:-1], x.shape[-1] + _GAP), _filler(x), dtype=x.dtype, device=x.device)
    view = room[..., : x.shape[-1]]
    view.copy_(x)
    return view


def _offset(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, starting one element into its memory: no vector load is aligned."""
    if x.dim() < 2:
        return x
    room = torch.full((x.numel() + 1,), _filler(x), dtype=x.dtype, device=x.device)
    view = room[1:].view(x.shape)
    view.copy_(x)
    return view


def _filler(x: torch.Tensor) -> Any:
    return torch.nan if x.dtype.is_floating_point else x.dtype != torch.bool and torch.iinfo(x.dtype).max


def _check(trial: Trial, change: Any) -> None:
    plain = trial.on_device()
    trial.claim(plain)
    operator = trial.subject.operator
    # What the operator writes keeps its memory, and so does what a forward saved for this backward.
    kept = {*(name.partition(".")[0] for name in operator.mutates), "saved"}
    arguments = {name: value if name in kept else mapped(value, change) for name, value in plain.items()}
    before = {path: tensor.detach().clone() for path, tensor in tensors(dict(arguments))}
    try:
        trial.claim(arguments)
        result = trial.call(arguments)
    except (Declined, ValueError) as refusal:
        synchronize(trial)
        changed = changed_inputs(before, arguments)
        if changed:
            raise Failure(f"refused ({refusal}) after it had changed {', '.join(changed)}") from refusal
        trial.notes.append(f"refuses such operands: {refusal}")
        return
    synchronize(trial)
    trial.judge(result, arguments)


def strided(trial: Trial) -> None:
    """Operands whose rows are further apart than they are long."""
    _check(trial, _strided)


def offset(trial: Trial) -> None:
    """Operands that start at an odd element."""
    _check(trial, _offset)


def _movable(subject: Subject, space: Space) -> str | None:
    return "operands are views of one tensor, as an argument promises" if space.views else None


register(
    Check("strided", strided, _movable, 1, 3, "operands with gaps between rows"),
    Check("offset", offset, _movable, 1, 3, "operands that start at an odd element"),
)
