# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Claims about bits: the same call gives the same bits again, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import torch

from te_dispatch.conformance.checks import Check, register
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.memory import same_bits
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial

#: A race that shows in one run of ten is found with probability 1 - 0.9^8 = 57% per case.
REPETITIONS = 8


def _results(trial: Trial) -> dict[str, torch.Tensor]:
    arguments = trial.on_device()
    trial.claim(arguments)
    result = trial.call(arguments)
    synchronize(trial)
    return {path: tensor.clone() for path, tensor in trial.results(result, arguments).items()}


def repeatable(trial: Trial) -> None:
    """The claim ``deterministic``: equal arguments give equal bits, run after run."""
    first = _results(trial)
    for repetition in range(1, REPETITIONS):
        again = _results(trial)
        for path, tensor in first.items():
            if not same_bits(tensor, again[path]):
                differing = int((tensor != again[path]).sum())
                raise Failure(f"{path} differs in run {repetition + 1} of {REPETITIONS} ({differing} elements)")


def batch_invariant(trial: Trial) -> None:
    """The claim ``batch_invariant``: the first rows of a call equal the same rows computed alone."""
    assert trial.space.batch is not None
    whole = _results(trial)
    arguments = trial.on_device(trial.space.batch(trial.arguments()))
    trial.claim(arguments)
    result = trial.call(arguments)
    synchronize(trial)
    for path, part in trial.results(result, arguments).items():
        of_whole = whole[path]
        if part.shape == of_whole.shape:
            continue  # a sum over rows, or a scale: not a result per row
        if not same_bits(part, of_whole[: part.shape[0]]):
            raise Failure(f"{path}: the first {part.shape[0]} rows differ from those of the call with twice the rows")


def _claiming(name: str) -> str:
    return f"does not claim {name}"


def _repeatable_applies(subject: Subject, space: Space) -> str | None:
    return None if "deterministic" in subject.claims else _claiming("deterministic")


def _batch_applies(subject: Subject, space: Space) -> str | None:
    if space.batch is None:
        return "a call has no independent rows"
    return None if "batch_invariant" in subject.claims else _claiming("batch_invariant")


register(
    Check(
        "repeatable",
        repeatable,
        _repeatable_applies,
        1,
        4,
        "claim deterministic: equal bits run after run",
        claim="deterministic",
    ),
    Check(
        "batch_invariant",
        batch_invariant,
        _batch_applies,
        1,
        4,
        "claim batch_invariant: rows do not see others",
        claim="batch_invariant",
    ),
)
