# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""NaN and Inf in one operand after the other: weights, biases, residuals, statistics and gradients, too.

The axis ``values`` of a space fills the main operands. Here every operand of floating point that is read and not
quantized gets a NaN in one element, then an Inf and a -Inf in two others, while all other operands keep the case's
values. The contracts say what comes of them (docs/numerics.md): what the formula says. Where Inf and NaN may come of
the same formula, as of a sum in another order, either is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.memory import ANY, ROWS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INFINITE = (math.inf, -math.inf)


def nonfinite(trial: Trial) -> None:
    """Each operand by itself; the message names it."""
    for name in _operands(trial.arguments(), trial.subject.operator.memory):
        _judge(trial, name, (math.nan,))
        if not _gives_codes(trial):
            _judge(trial, name, _INFINITE)


def _judge(trial: Trial, name: str, special: tuple[float, ...]) -> None:
    what = " and ".join(f"{value:+}".replace("+nan", "NaN") for value in special)
    other = trial.with_values(f"{what} in {name}", functools.partial(_with_planted, name, special))
    arguments = other.on_device()
    other.claim(arguments)
    try:
        # Which raises where a backward of autograd's own gives NaN; operators are below it.
        with torch.autograd.set_detect_anomaly(True):
            result = other.call(arguments)
        synchronize(other)
        other.judge(result, arguments, _either if special == _INFINITE else None)
    except Failure as failure:
        raise Failure(f"with {what} in {name}: {failure}", failure.findings) from failure


def _either(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """What is judged: what is expected where that is NaN, or where it is Inf and the result is Inf or NaN."""
    if actual.shape != expected.shape or not (actual.is_floating_point() and expected.is_floating_point()):
        return actual
    open_ = expected.isnan() | (expected.isinf() & ~actual.isfinite())
    return torch.where(open_, expected.to(actual.dtype), actual)


def _gives_codes(trial: Trial) -> bool:
    """Whether a result is a cast, whose codes of Inf and NaN differ."""
    return any(expected.element_size() == 1 and expected.dtype != torch.bool for expected in trial.expected().values())


def _operands(arguments: Mapping[str, Any], memory: Mapping[str, str]) -> list[str]:
    """Names of the operands that hold floating point numbers, and are only read."""
    return [n for n, x in arguments.items() if memory.get(n) in (ANY, ROWS) and _planted(x, (math.nan,)) is not x]


def _with_planted(name: str, special: tuple[float, ...], arguments: Arguments) -> Arguments:
    return {**arguments, name: _planted(arguments[name], special)}


def _planted(value: Any, special: tuple[float, ...]) -> Any:
    """A copy with special values in rows and columns of their own; the value itself where it cannot have them."""
    if isinstance(value, (list, tuple)):
        made = [_planted(item, special) for item in value]
        return type(value)(made) if any(new is not old for new, old in zip(made, value)) else value
    if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES or not value.numel():
        return value
    copy: torch.Tensor = value.clone()
    for turn, number in enumerate(special, 1):
        copy[tuple(size * turn // (len(special) + 1) for size in copy.shape)] = number
    return copy


def _applies(subject: Subject, space: Space) -> str | None:
    if subject.operator.family == "attention":
        return "what reaches a result through keys that are masked depends on a kernel's tiles"
    if space.views:
        return "operands are views of one tensor, as an argument promises"
    return "which elements are dropped is not known before the call" if space.dropout is not None else None


CHECKS = (Check("nonfinite", nonfinite, _applies, 2, 5, "NaN and Inf in each operand by itself", each_operand=True),)
