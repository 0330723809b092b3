# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Caches keyed by the tensors of a call: one operand, or one option, changes, and all other tensors are the same
objects as in an earlier call."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.memoized import call_again, keepable
from te_dispatch.conformance.checks.sharing import GRADIENTS
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.memory import same_bits
from te_dispatch.conformance.oracle import OracleError
from te_dispatch.conformance.space import Arguments
from te_dispatch.conformance.transfer import moved, options, tensors
from te_dispatch.conformance.trial import Trial
from te_dispatch.core.errors import Declined
from te_dispatch.core.memory import ANY, ROWS

#: Seconds after which no further call is made: interpreted kernels take seconds each.
_BUDGET_S = 4.0
#: Objects that are made to find a place again.
_PLACES = 50
#: What options that are fractions are multiplied with. A cache may be keyed by one that was rounded.
_FACTORS = {"half": 0.5, "slightly other": 1.0 - 2.0**-6, "hardly other": 1.0 - 2.0**-13}


def renewed(trial: Trial) -> None:
    """Calls that differ from the first one in an operand, or in an option, and share its other tensors."""
    given = trial.arguments()
    there = moved(given, trial.device)
    call_again(trial, there, "")
    until = time.monotonic() + _BUDGET_S
    gone: dict[str, int] = {}
    for other, what in _others(trial, given):
        if time.monotonic() > until:
            trial.notes.append(f"not all operands and options were renewed, which took {_BUDGET_S:g} s")
            return
        fresh = other.arguments()
        kept = {name for name, value in fresh.items() if name in given and _equal(value, given[name])}
        if not any(any(True for _ in tensors({name: fresh[name]})) for name in kept):
            continue
        mixed = {
            name: there[name] if name in kept else _placed(moved(value, trial.device), gone.get(name))
            for name, value in fresh.items()
        }
        gone = {name: id(value) for name, value in mixed.items() if name not in kept}
        try:
            call_again(other, mixed, f"with {what}, and the other tensors of an earlier call: ")
        except (NotClaimed, Declined):
            continue
        finally:
            del mixed
    call_again(trial, there, "behind calls with other operands and options: ")


def _placed(value: Any, address: int | None) -> Any:
    """A quantizer in the place of one that is gone, whose id it then has, where Python gives that place out again."""
    if address is None or not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    spare: list[Any] = []
    while id(value) != address and len(spare) < _PLACES:
        spare.append(value)
        value = dataclasses.replace(value)
    return value


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments have the same options, and tensors of the same metadata and bytes."""
    if options(one) != options(other):
        return False
    old = dict(tensors({"": other}))
    return all(same_bits(tensor, old[path]) for path, tensor in tensors({"": one}))


def _others(trial: Trial, given: Arguments) -> Iterator[tuple[Trial, str]]:
    """Trials of which each differs in one operand, or in one axis of the case, with words for it."""
    subject, space = trial.subject, trial.space
    same, later = trial.with_axes(trial.case.values), trial.with_seed(trial.case.seed + 1).arguments()
    for name, value in later.items():
        for how, factor in _FACTORS.items():
            times = _times(value, factor)
            if options(times) != options(value):
                other = same.with_values(f"{how}_{name}", functools.partial(_with, name, times))
                if _accepted(other):
                    yield other, f"{how} {name}"
        read = subject.operator.memory.get(name) in (ANY, ROWS)
        # A backward reads what its forward made of the others.
        if not read or (subject.operator.backward and space.forward is None and name not in GRADIENTS):
            continue
        if options(value) == options(given.get(name)) and _numbers(value) and _numbers(given[name]):
            renewal = functools.partial(_with, name, value)
            yield same.with_values(f"renewed_{name}", renewal), f"another {name}"
    dealt = same.with_values("rotated", _rotated)
    if options(_rotated(given)) != options(given) and _accepted(dealt):
        yield dealt, "integers dealt otherwise"
    turned = same.with_values("turned", _turned)
    if not _equal(_turned(given), given) and _accepted(turned):
        yield turned, "rows of integers in another order"
    values = trial.case.values
    for axis in space.axes:
        for option in axis.values:
            changed = {**values, axis.name: option}
            if option != values[axis.name] and space.valid(changed):
                yield trial.with_axes(changed), f"{axis.name}={option}"


def _with(name: str, value: Any, arguments: Arguments) -> Arguments:
    return {**arguments, name: moved(value, "cpu")}


def _rotated(arguments: Arguments) -> Arguments:
    """The last of every list of integers first: splits of the same sum."""
    return {
        name: [value[-1], *value[:-1]] if isinstance(value, list) and set(map(type, value)) == {int} else value
        for name, value in arguments.items()
    }


def _turned(arguments: Arguments) -> Arguments:
    """The rows of every matrix of integers in reverse order: of what is made of them, the same numbers as often."""
    return {
        name: value.flip(0)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int32, torch.int64)
        else value
        for name, value in arguments.items()
    }


def _accepted(trial: Trial) -> bool:
    """Whether the oracle serves the call: other lists need not go with the other arguments."""
    try:
        trial.expected()
    except (ValueError, OracleError):
        return False
    return True


def _times(value: Any, factor: float) -> Any:
    """The value with every float in it, also in nested lists, multiplied by a factor."""
    if isinstance(value, (list, tuple)):
        return type(value)(_times(item, factor) for item in value)
    return value * factor if isinstance(value, float) else value


def _numbers(value: Any) -> bool:
    """Whether an operand has finite numbers alone, and some: integers say where something is."""
    found = [tensor for _, tensor in tensors({"": value}) if tensor.numel()]
    return bool(found) and all(x.is_floating_point() and bool(x.isfinite().all()) for x in found)


CHECKS = (
    Check(
        "renewed",
        renewed,
        keepable,
        0,
        2,
        "another operand, or another option, with the other tensors of an earlier call",
        of_forms=True,
    ),
)
