# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Saved formats are honest: a backward gives the same gradients behind any forward that declares its format."""

from __future__ import annotations

import contextlib

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.forwards import NotClaimed, behind, forward_of
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.conformance.transfer import moved
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.operator import OPERATORS


def saved_format(trial: Trial) -> None:
    """Run behind every installed forward of the same saved format, and judge each time."""
    assert trial.space.forward is not None and trial.subject.operator.companion is not None
    wanted = trial.subject.implementation.saved_format
    ran, declined = [], ""
    for forward in subjects(trial.subject.manager, OPERATORS[trial.subject.operator.companion], trial.device):
        if forward.implementation.saved_format != wanted:
            continue
        arguments = moved(trial.arguments(), trial.device)
        forward_arguments = trial.space.forward(arguments)
        if forward.claim(forward_arguments).refusal is not None:
            continue
        try:
            arguments = behind(forward, forward_arguments, arguments)
        except NotClaimed as reason:
            declined = f": {reason}"
            continue
        if trial.subject.claim(arguments).refusal is not None:
            continue
        result = trial.call(arguments)
        synchronize(trial)
        try:
            trial.judge(result, arguments)
        except Failure as failure:
            raise Failure(f"behind {forward.id}, which saves {wanted!r} too: {failure}", failure.findings) from failure
        ran.append(forward.id)
    if not ran:
        raise NotClaimed(f"no forward that saves {wanted!r} serves this call{declined}")
    trial.notes.append(f"behind {', '.join(ran)}")


def saved_state(trial: Trial) -> None:
    """What a forward saves stays as it was: the quantizers' scales and the random state move on behind it, as they do
    at the end of a step, other forwards follow, and the backward runs twice, as with ``retain_graph``."""
    assert trial.space.forward is not None
    arguments = moved(trial.arguments(), trial.device)
    given = trial.space.forward(moved(arguments, trial.device))
    arguments = behind(forward_of(trial.subject, given), given, arguments)
    synchronize(trial)
    if isinstance(given.get("rng_state"), torch.Tensor):  # the caller's own, who draws the next one into it
        given["rng_state"].add_(1)
    for value in given.values():
        scale = getattr(value, "scale", None)
        if isinstance(scale, torch.Tensor):  # of a quantizer
            scale.mul_(2)
    other = trial.with_seed(trial.case.seed + 1)
    with contextlib.suppress(NotClaimed):
        other.on_device()
    trial.claim(arguments)
    for when in ("behind a forward whose scales moved on: ", "a second time on what one forward saved: "):
        result = trial.call(arguments)
        synchronize(trial)
        try:
            trial.judge(result, arguments)
        except Failure as failure:
            raise Failure(f"{when}{failure}", failure.findings) from failure


def _reads_saved(subject: Subject, space: Space) -> str | None:
    return None if space.forward is not None else "reads nothing but the operator's own results"


CHECKS = (
    Check("saved_format", saved_format, _reads_saved, 1, 3, "gradients behind any forward of the same format"),
    Check("saved_state", saved_state, _reads_saved, 1, 3, "backwards run twice, behind scales that moved on"),
)
