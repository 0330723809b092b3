# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout: which elements fall is the implementation's choice; how many, how often again, and what follows is not.

A mask of n elements keeps a binomial number of them: n q with standard deviation sqrt(n p q), q = 1 - p. Two
independent masks, or two disjoint halves of one, agree in a binomial number too, with probability p^2 + q^2. A right
implementation leaves six standard deviations once in 5 x 10^8 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.conformance.checks import Check, register
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Arguments, Judged, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial, forward_of

SIGMAS = 6.0


def dropout(trial: Trial) -> None:
    """Recover the mask from results; count it; draw again; judge the call by the mask."""
    plan = trial.space.dropout
    assert plan is not None
    arguments = trial.on_device()
    trial.claim(arguments)
    run, given = _forward(trial, arguments)
    keep, live = plan.recover(run, given)
    p = float(arguments["dropout_p"])
    _require_share(f"{1 - p:.0%} of the elements are kept", keep[live], 1 - p)
    if not torch.equal(plan.recover(run, given)[0], keep):
        raise Failure("equal rng_state, other elements dropped")
    for place, name in enumerate(("seed", "offset")):
        state = given["rng_state"].clone()
        state[place] += 1
        other, _ = plan.recover(run, {**given, "rng_state": state})
        _require_share(
            f"masks of neighbouring {name}s are independent: they agree", (keep == other)[live], p * p + (1 - p) ** 2
        )
    _require_independent(keep, live, p)
    result = trial.call(arguments)
    synchronize(trial)
    actual = {path: tensor.detach().cpu() for path, tensor in trial.results(result, arguments).items()}
    subject = trial.subject
    judged = Judged(trial.case.values, trial.arguments(), {}, actual, subject.traits, subject.claims)
    trial.compare(actual, *plan.judged(judged, keep))
    trial.notes.append(f"kept {int(keep[live].sum())} of {int(live.sum())} with probability {1 - p:g}")


def _forward(trial: Trial, arguments: Arguments) -> tuple[Callable[[Arguments], Any], Arguments]:
    """What draws the mask, and its arguments."""
    if trial.space.forward is None:
        return trial.call, arguments
    given = trial.space.forward(arguments)
    return forward_of(trial.subject, given).call, given


def _require_independent(keep: torch.Tensor, live: torch.Tensor, p: float) -> None:
    """Neighbours along every dimension, in disjoint pairs."""
    for axis in range(keep.dim()):
        pairs = keep.shape[axis] // 2 * 2
        one, other = (
            x.narrow(axis, 0, pairs).reshape(*x.shape[:axis], pairs // 2, 2, *x.shape[axis + 1 :]) for x in (keep, live)
        )
        (a, b), both = one.unbind(axis + 1), other.all(axis + 1)
        _require_share(
            f"neighbours along axis {axis} of the mask are independent: they agree",
            (a == b)[both],
            p * p + (1 - p) ** 2,
        )


def _require_share(what: str, found: torch.Tensor, share: float) -> None:
    n, count = found.numel(), int(found.sum())
    if abs(count - n * share) > SIGMAS * math.sqrt(n * share * (1 - share)) + 1:
        raise Failure(f"{what}: {count} of {n}, expected {n * share:.0f}, +- {SIGMAS:g} standard deviations")


def _applies(subject: Subject, space: Space) -> str | None:
    return None if space.dropout is not None else "nothing is dropped"


register(Check("dropout", dropout, _applies, 1, None, "the dropped share, its replay, and results by the mask found"))
