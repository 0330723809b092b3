# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout: which elements fall is the implementation's choice; how many, how often again, and what follows is not.

A mask of n elements keeps a binomial number of them: n q with standard deviation sqrt(n p q), q = 1 - p. Two
independent masks, or two disjoint halves of one, agree in a binomial number too, with probability p^2 + q^2. A right
implementation leaves six standard deviations once in 5 x 10^8 cases. Masks of states that differ in one bit of the seed
or of the offset, low or high, are independent.

The sum over i of c_i c_(i + lag), c the mask less q, has mean 0 and variance (p q)^2 for each of the pairs summed, for
every lag: a mask that repeats itself, by rows, tiles, heads or blocks of any length, has a lag where each pair adds
p q. There are as many lags as elements, so `LAG_SIGMAS` standard deviations are allowed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.space import Arguments, Judged, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial, forward_of, run_forward

SIGMAS = 6.0
#: Of the CPU, with which a mask is drawn again.
THREADS = 3
LAG_SIGMAS = 8.0
#: Lags with fewer pairs are not looked at: their sums are far from normal. Nor are masks with a p nearer to 0 or 1.
LAG_PAIRS, LAG_P = 1024, 0.1
#: Bits of a seed, and of an offset, that are changed: one of each range, another one in each case. The sign is none.
LOW_BITS, HIGH_BITS = range(32), range(32, 63)


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
    if trial.device.type == "cpu":
        with thread_count(THREADS):
            if not torch.equal(plan.recover(run, given)[0], keep):
                raise Failure(f"equal rng_state, other elements dropped with {THREADS} threads of the CPU")
    zero = {**given, "rng_state": torch.zeros_like(given["rng_state"])}
    if not torch.equal(plan.recover(run, zero)[0], plan.recover(run, zero)[0]):
        raise Failure("equal rng_state, seed and offset 0, other elements dropped")
    for place, name in enumerate(("seed", "offset")):
        for changed, what in _changed(int(given["rng_state"][place]), trial.case.random_seed >> (8 * place)):
            state = given["rng_state"].clone()
            state[place] = changed
            other, _ = plan.recover(run, {**given, "rng_state": state})
            _require_share(
                f"masks of {name}s that differ {what} are independent: they agree",
                (keep == other)[live],
                p * p + (1 - p) ** 2,
            )
    _require_independent(keep, live, p)
    _require_no_repetition(keep, live, p)
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
    return functools.partial(run_forward, forward_of(trial.subject, given)), given


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


def _changed(number: int, choice: int) -> Iterator[tuple[int, str]]:
    """The next number, and the same with a low and with a high bit changed, which `choice` chooses."""
    yield number + 1, "by 1"
    for bits in (LOW_BITS, HIGH_BITS):
        bit = bits[choice % len(bits)]
        yield number ^ (1 << bit), f"in bit {bit}"


def _require_no_repetition(keep: torch.Tensor, live: torch.Tensor, p: float) -> None:
    """No part of the mask, in memory's order, is like one further on."""
    n = keep.numel()
    if n <= LAG_PAIRS or not LAG_P <= p <= 1 - LAG_P:
        return
    centred = torch.where(live, keep.double() - (1 - p), 0.0).flatten()
    products, pairs = _autocorrelation(centred), _autocorrelation(live.double().flatten())
    known = pairs >= LAG_PAIRS
    known[0] = False
    if not bool(known.any()):
        return
    sigmas = torch.where(known, products / (p * (1 - p) * pairs.clamp_min(1).sqrt()), 0.0)
    lag = int(sigmas.abs().argmax())
    if abs(float(sigmas[lag])) > LAG_SIGMAS:
        raise Failure(
            f"elements of the mask that are {lag} apart are not independent: their covariance is "
            f"{float(products[lag] / pairs[lag]):.3g}, {float(sigmas[lag]):.0f} standard deviations from 0"
        )


def _autocorrelation(x: torch.Tensor) -> torch.Tensor:
    """The sum over i of x_i x_(i + lag), for lags from 0 to n - 1."""
    spectrum = torch.fft.rfft(x, 2 * x.numel())
    found: torch.Tensor = torch.fft.irfft(spectrum * spectrum.conj(), 2 * x.numel())[: x.numel()]
    return found


def _require_share(what: str, found: torch.Tensor, share: float) -> None:
    n, count = found.numel(), int(found.sum())
    if abs(count - n * share) > SIGMAS * math.sqrt(n * share * (1 - share)) + 1:
        raise Failure(f"{what}: {count} of {n}, expected {n * share:.0f}, +- {SIGMAS:g} standard deviations")


def _applies(subject: Subject, space: Space) -> str | None:
    return None if space.dropout is not None else "nothing is dropped"


CHECKS = (Check("dropout", dropout, _applies, 1, None, "the dropped share, its replay, and results by the mask found"),)
