# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where results lie, where the contract says so: gradients of packed operands are views of one packed tensor, and a
record with another layout or one copy more shares what it does not change."""

from __future__ import annotations

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial


def placement(trial: Trial) -> None:
    """`Space.placed` finds nothing wrong."""
    assert trial.space.placed is not None
    arguments = trial.on_device()
    trial.claim(arguments)
    result = trial.call(arguments)
    synchronize(trial)
    wrong = trial.space.placed(arguments, trial.results(result, arguments))
    if wrong is not None:
        raise Failure(wrong)


def _applies(subject: Subject, space: Space) -> str | None:
    return None if space.placed is not None else "results may lie anywhere"


CHECKS = (Check("placement", placement, _applies, 2, None, "where results lie, where the contract says so"),)
