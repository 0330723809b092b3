# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout: which elements fall is the implementation's choice; how many, how often again, and what follows is not.

Two independent masks that keep elements with probability q = 1 - p, or two disjoint halves of one, agree in a binomial
number of them, with probability p^2 + q^2. Masks of states that differ in one bit of the seed or of the offset, low or
high, are independent. The statistics are those of `te_dispatch.conformance.chance`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.conformance.chance import THREADS, changed_states, next_state, require_no_repetition, require_share
from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.forwards import forward_of, run_forward
from te_dispatch.conformance.space import Arguments, Judged, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.core.memory import ANY, ROWS

#: Sums of masks with a p nearer to 0 or 1 are far from normal: lags are not looked at.
LAG_P = 0.1


def dropout(trial: Trial) -> None:
    """Recover the mask from results; count it; draw again; judge the call by the mask."""
    plan = trial.space.dropout
    assert plan is not None
    arguments = trial.on_device()
    trial.claim(arguments)
    run, given = _forward(trial, arguments)
    keep, live = plan.recover(run, given)
    p = float(arguments["dropout_p"])
    require_share(f"{1 - p:.0%} of the elements are kept", keep[live], 1 - p)
    if not torch.equal(plan.recover(run, given)[0], keep):
        raise Failure("equal rng_state, other elements dropped")
    _require_the_share_of_another_p(plan.recover, run, given, p)
    if trial.device.type == "cpu":
        with thread_count(THREADS):
            if not torch.equal(plan.recover(run, given)[0], keep):
                raise Failure(f"equal rng_state, other elements dropped with {THREADS} threads of the CPU")
    _require_the_same_for_inference(trial, plan.recover, run, given, keep)
    _require_the_same_of_copies(trial, plan.recover, run, given, keep)
    zero = {**given, "rng_state": torch.zeros_like(given["rng_state"])}
    if not torch.equal(plan.recover(run, zero)[0], plan.recover(run, zero)[0]):
        raise Failure("equal rng_state, seed and offset 0, other elements dropped")
    for state, what in changed_states(given["rng_state"].cpu(), trial.case.random_seed):
        other, _ = plan.recover(run, {**given, "rng_state": state.to(given["rng_state"].device)})
        require_share(
            f"masks of {what} are independent: they agree",
            (keep == other)[live],
            p * p + (1 - p) ** 2,
        )
    _require_independent(keep, live, p)
    if LAG_P <= p <= 1 - LAG_P:
        require_no_repetition("the mask", _standard(keep, p), live)
        other, _ = plan.recover(run, {**given, "rng_state": next_state(given["rng_state"])})
        both, known = (torch.stack(pair) for pair in ((keep, other), (live, live)))
        require_no_repetition("the masks of two offsets in turn", _standard(both, p), known)
    result = trial.call(arguments)
    synchronize(trial)
    actual = {path: tensor.detach().cpu() for path, tensor in trial.results(result, arguments).items()}
    subject = trial.subject
    judged = Judged(trial.case.values, trial.arguments(), {}, actual, subject.traits, subject.claims)
    trial.compare(actual, *plan.judged(judged, keep))
    trial.notes.append(f"kept {int(keep[live].sum())} of {int(live.sum())} with probability {1 - p:g}")


def _standard(keep: torch.Tensor, p: float) -> torch.Tensor:
    """The choices with mean 0 and variance 1."""
    return (keep.double() - (1 - p)) / math.sqrt(p * (1 - p))


def _drawing(trial: Trial, given: Arguments) -> Subject:
    """The implementation that draws the mask: of a backward, its forward."""
    return trial.subject if trial.space.forward is None else forward_of(trial.subject, given)


def _require_the_share_of_another_p(
    recover: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    run: Callable[[Arguments], Any],
    given: Arguments,
    p: float,
) -> None:
    """On the same state and operands: what an implementation keeps of a mask is not found without its probability."""
    other = p + 0.375 if p < 0.5 else p - 0.375
    keep, live = recover(run, {**given, "dropout_p": other})
    require_share(f"with the same rng_state and dropout_p={other:g}, {1 - other:.1%} are kept", keep[live], 1 - other)


def _require_the_same_for_inference(
    trial: Trial,
    recover: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    run: Callable[[Arguments], Any],
    given: Arguments,
    keep: torch.Tensor,
) -> None:
    """One implementation drops the same elements whether a backward follows or not, where it serves both."""
    forward = _drawing(trial, given)
    if "inference" not in forward.operator.signature.parameters:
        return
    other = {**given, "inference": not given.get("inference", False)}
    if forward.claim(other).refusal is None and not torch.equal(recover(run, other)[0], keep):
        raise Failure(f"equal rng_state, other elements dropped with inference={other['inference']}")


def _require_the_same_of_copies(
    trial: Trial,
    recover: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    run: Callable[[Arguments], Any],
    given: Arguments,
    keep: torch.Tensor,
) -> None:
    """Operands with other strides, as a recomputation may have them, where the implementation serves those."""
    forward = _drawing(trial, given)
    memory = forward.operator.memory
    turned = {name: _turned(x) if memory.get(name) in (ANY, ROWS) else x for name, x in given.items()}
    if trial.space.views or forward.claim(turned).refusal is not None:
        return
    try:
        other, _ = recover(run, turned)
    except Declined:
        return
    if not torch.equal(other, keep):
        raise Failure("equal rng_state, other elements dropped where operands lie otherwise in memory")


def _turned(x: Any) -> Any:
    """The same numbers, with the last dimension next to that before it in memory."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        return x
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _forward(trial: Trial, arguments: Arguments) -> tuple[Callable[[Arguments], Any], Arguments]:
    """What draws the mask, and its arguments."""
    if trial.space.forward is None:
        return trial.call, arguments
    given = trial.space.forward(arguments)
    return functools.partial(run_forward, _drawing(trial, given)), given


def _require_independent(keep: torch.Tensor, live: torch.Tensor, p: float) -> None:
    """Neighbours along every dimension, in disjoint pairs."""
    for axis in range(keep.dim()):
        pairs = keep.shape[axis] // 2 * 2
        one, other = (
            x.narrow(axis, 0, pairs).reshape(*x.shape[:axis], pairs // 2, 2, *x.shape[axis + 1 :]) for x in (keep, live)
        )
        (a, b), both = one.unbind(axis + 1), other.all(axis + 1)
        require_share(
            f"neighbours along axis {axis} of the mask are independent: they agree",
            (a == b)[both],
            p * p + (1 - p) ** 2,
        )


def _applies(subject: Subject, space: Space) -> str | None:
    return None if space.dropout is not None else "nothing is dropped"


CHECKS = (Check("dropout", dropout, _applies, 1, None, "the dropped share, its replay, and results by the mask found"),)
