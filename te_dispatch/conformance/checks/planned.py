# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that an implementation's plan prepares (`te_dispatch.core.repeating`) do what the operator does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.memoized import Rescaled, alike, scales_of, write
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized


def planned(trial: Trial) -> None:
    """Plan a call that was just made. Launch the plan for other operands with the same metadata, then for the first
    ones again, and judge each result.

    Arguments that do not vary are the same objects in every launch, with other contents. A quantizer's scale is one of
    them, because a module's changes from step to step. A launch must not change the result of the launch before it.
    """
    there = trial.on_device()
    trial.claim(there)
    trial.call(there)
    other = alike(trial, trial.arguments())
    if other is None:
        trial.notes.append("no other data of the same options was found, so plans were launched for the first alone")
    scaled = scales_of(trial.arguments())
    rescaled = Rescaled(trial.subject, trial.case, trial.oracle, trial.space) if scaled else None
    served = 0
    for varying in _choices(trial, there):
        launch = _planned(trial, varying, there)
        if launch is not None:
            served += 1
            _launch_in_turn([one for one in (trial, other, rescaled, trial) if one is not None], varying, there, launch)
    if not served:
        trial.notes.append("nothing was planned")


def _choices(trial: Trial, arguments: Arguments) -> Iterator[tuple[str, ...]]:
    """Names of what may vary: every operand that is only read, as modules ask; nothing; the first operand alone."""
    operator = trial.subject.operator
    names = tuple(
        name
        for name in operator.signature.parameters
        if isinstance(arguments.get(name), (torch.Tensor, Quantized)) and name not in operator.mutates
    )
    yield from dict.fromkeys((names, (), names[:1]))


def _planned(trial: Trial, varying: tuple[str, ...], arguments: Arguments) -> Callable[..., Any] | None:
    subject = trial.subject
    plan = subject.manager.functions.declared(subject.id, "plan")
    assert plan is not None
    call = subject.operator.signature.bind(**arguments)
    call.apply_defaults()
    launch = plan(varying, **call.arguments)
    if launch is not None and not callable(launch):
        raise Failure(f"its plan returned {type(launch).__name__}, expected a function of {_listed(varying)}, or None")
    return launch  # type: ignore[no-any-return]


def _launch_in_turn(
    trials: list[Trial], varying: tuple[str, ...], there: Arguments, launch: Callable[..., Any]
) -> None:
    staying = {name: x for name, x in there.items() if name not in varying}
    rewritten = {x.untyped_storage().data_ptr() for _, x in tensors(staying)}
    before: tuple[Trial, Any, Arguments] | None = None
    for one in trials:
        fresh = one.on_device()
        write(there, one.arguments())
        arguments = {**there, **{name: fresh[name] for name in varying}}
        try:
            result = launch(*(arguments[name] for name in varying))
        except Declined:
            return
        synchronize(one)
        if before is not None and not before[0].subject.operator.mutates:
            _judge(*before, f"planned for other {_listed(varying)}, what it returned before was changed: ")
        _judge(one, result, arguments, f"planned for other {_listed(varying)}: ")
        # Where the operator allows it, a result is a view of an operand, and changes when the operand is written.
        made = [x for x in one.made(result, arguments).values() if x.numel()]
        shares = any(x.untyped_storage().data_ptr() in rewritten for x in made)
        before = None if shares else (one, result, arguments)
    write(there, trials[0].arguments())


def _judge(trial: Trial, result: Any, arguments: Arguments, when: str) -> None:
    try:
        trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"{when}{failure}", failure.findings) from failure


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "contents"


def _applies(subject: Subject, space: Space) -> str | None:
    if space.forward is not None and subject.operator.backward:
        return "what its forward saved belongs to one call"
    try:
        plan = subject.manager.functions.declared(subject.id, "plan")
    except Exception:  # that it cannot be imported is said where a module asks
        return None
    return "its manifest names no plan" if plan is None else None


CHECKS = (Check("planned", planned, _applies, 2, 6, "calls that its plan prepares", of_forms=True),)
