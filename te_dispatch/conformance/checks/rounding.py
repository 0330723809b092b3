# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Stochastic rounding: which of its two codes a value becomes is the implementation's choice; how often it becomes the
larger one, when it does so again, and what the choices of others tell of it is not.

A choice is 1 with the probability p of the value's position between its codes. Less p, over sqrt(p (1 - p)), it has
mean 0 and variance 1, whatever p is, and so has the product of two independent ones. The statistics are those of
`te_dispatch.conformance.chance`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from te_dispatch.conformance.chance import SIGMAS, THREADS, changed_states, next_state, require_no_repetition
from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.space import Arguments, Drawn, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped
from te_dispatch.conformance.trial import Failure, Trial

#: Positions that are counted apart: a draw of a few bits shows only near a code.
PARTS = (0.0, 1 / 64, 0.25, 0.75, 63 / 64, 1.0)
#: Products of choices nearer to 0 or 1 are far from normal.
MIDDLE = 0.1
#: Halvings of what a draw may be: draws of fewer bits show.
HALVINGS = 18


def rounding(trial: Trial) -> None:
    """Recover the choices; count them; draw again, by equal and by other states; compare elements and copies."""
    plan, host = trial.space.rounding, trial.arguments()
    assert plan is not None
    arguments = trial.on_device()
    trial.claim(arguments)

    def draw(given: Arguments) -> Mapping[str, Drawn]:
        result: Any = trial.call(given)
        synchronize(trial)
        return plan.recover(host, mapped(result, lambda x: x.detach().cpu()))

    drawn = draw(arguments)
    for copy, one in drawn.items():
        _require_shares(copy, one)
        require_no_repetition(f"the {copy}-wise copy", _standard(one), _middle(one))
    if not _equal(drawn, draw(arguments)):
        raise Failure("equal rng_state, other codes")
    if trial.device.type == "cpu":
        with thread_count(THREADS):
            if not _equal(drawn, draw(arguments)):
                raise Failure(f"equal rng_state, other codes with {THREADS} threads of the CPU")
    for what, given in _into_memory(trial, arguments):
        if not _equal(drawn, draw(given)):
            raise Failure(f"equal rng_state, other codes {what}")
    zero = {**arguments, "rng_state": torch.zeros_like(arguments["rng_state"])}
    if not _equal(draw(zero), draw(zero)):
        raise Failure("equal rng_state, seed and offset 0, other codes")
    for state, what in changed_states(arguments["rng_state"].cpu(), trial.case.random_seed):
        others = draw({**arguments, "rng_state": state.to(trial.device)})
        for copy, one in drawn.items():
            _require_independent(f"draws of {what}", one, others[copy])
    for copy, one in draw({**arguments, "rng_state": next_state(arguments["rng_state"])}).items():
        choices, known = ((f(drawn[copy]).flatten(), f(one).flatten()) for f in (_standard, _middle))
        require_no_repetition(f"the {copy}-wise copies of two offsets in turn", torch.cat(choices), torch.cat(known))
    if len(drawn) == 2:
        row, column = drawn.values()
        if not plan.one(arguments):
            _require_independent("the two copies", row, column)
            _require_independent("the two copies, as they lie in memory,", _flat(row), _flat(_turned(column)))
        elif not torch.equal(row.up[row.known], column.up[row.known]):
            raise Failure("copies with the same scales were drawn for apart, expected one matrix")
    _require_fine_draws(trial, host)
    counted = sum(int(one.known.sum()) for one in drawn.values())
    trial.notes.append(f"{counted} values between two codes")


def _require_fine_draws(trial: Trial, host: Arguments) -> None:
    """Call again and again with one state, each value in the middle of where its element's draw may be by what the
    calls before chose. Half of the elements go up each time, whatever the draws are. Those of a few bits have no middle
    at last: all of them go up, or none. (Where draws depend on values, too, half go up as well, and nothing is found.)
    """
    plan = trial.space.rounding
    assert plan is not None
    low = torch.zeros(host["x"].numel(), dtype=torch.float64)
    high = torch.ones_like(low)
    for halving in range(1, HALVINGS + 1):
        middle = (low + high) / 2
        placed = plan.placed(host, middle)
        if placed is None:
            return
        result: Any = trial.call(trial.on_device(placed))
        synchronize(trial)
        recovered = plan.recover(placed, mapped(result, lambda x: x.detach().cpu()))
        if not recovered:
            return
        copy, one = next(iter(recovered.items()))
        up, known = one.up.flatten(), one.known.flatten()
        n, found = int(known.sum()), int((up & known).sum())
        if abs(found - n / 2) > SIGMAS * math.sqrt(n) / 2 + 1:
            raise Failure(
                f"{copy}-wise copy: after {halving - 1} calls that halved what each element's draw may be, {found} of "
                f"{n} values in the middle of the rest became the larger of their codes, expected half of them: draws "
                f"have fewer than {halving} bits, or are not uniform"
            )
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)


def _into_memory(trial: Trial, arguments: Arguments) -> Iterator[tuple[str, Arguments]]:
    """The same call with a record to write into, made by a cast to nearest; and with a flag besides."""
    if "out" not in trial.subject.operator.signature.parameters:
        return
    plain = {name: value for name, value in arguments.items() if name != "rng_state"}
    flag = torch.zeros(1, device=trial.device)
    for what, more in (("with `out` given", {}), ("with `out` and a `noop_flag` of 0", {"noop_flag": flag})):
        given = {**arguments, "out": trial.call(plain), **more}
        if trial.subject.claim(given).refusal is None:
            yield what, given


def _equal(one: Mapping[str, Drawn], other: Mapping[str, Drawn]) -> bool:
    return all(torch.equal(one[copy].up, other[copy].up) for copy in one)


def _standard(drawn: Drawn) -> torch.Tensor:
    """The choices with mean 0 and variance 1."""
    p = drawn.position.clamp(1e-9, 1 - 1e-9)
    return (drawn.up.double() - p) / (p * (1 - p)).sqrt()


def _middle(drawn: Drawn) -> torch.Tensor:
    return drawn.known & (drawn.position >= MIDDLE) & (drawn.position <= 1 - MIDDLE)


def _turned(drawn: Drawn) -> Drawn:
    return _changed(drawn, torch.t)


def _flat(drawn: Drawn) -> Drawn:
    return _changed(drawn, torch.flatten)


def _changed(drawn: Drawn, change: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
    return Drawn(*(change(getattr(drawn, field.name)) for field in dataclasses.fields(drawn)))


def _groups(drawn: Drawn) -> Iterator[tuple[str, torch.Tensor]]:
    yield "of all values", drawn.known
    yield "of positive values", drawn.known & ~drawn.negative
    yield "of negative values", drawn.known & drawn.negative
    yield "of subnormal values", drawn.known & drawn.subnormal
    for low, high in itertools.pairwise(PARTS):
        inside = (drawn.position >= low) & (drawn.position < high)
        yield f"of values at {low:.3g} to {high:.3g} of the way to the larger code", drawn.known & inside


def _require_shares(copy: str, drawn: Drawn) -> None:
    for what, group in _groups(drawn):
        p = drawn.position[group]
        expected, found = float(p.sum()), int(drawn.up[group].sum())
        deviation = math.sqrt(float((p * (1 - p)).sum()))
        if abs(found - expected) > SIGMAS * deviation + 1:
            raise Failure(
                f"{copy}-wise copy: {found} {what} became the larger of their codes, expected {expected:.0f} of "
                f"{p.numel()}, +- {SIGMAS:g} standard deviations of {deviation:.0f}"
            )


def _require_independent(what: str, one: Drawn, other: Drawn) -> None:
    both = _middle(one) & _middle(other)
    n = int(both.sum())
    total = float((_standard(one) * _standard(other))[both].sum())
    if abs(total) > SIGMAS * math.sqrt(n):
        raise Failure(
            f"{what} are not independent: their correlation is {total / n:.3g}, {total / math.sqrt(n):.0f} standard "
            "deviations from 0"
        )


def _applies(subject: Subject, space: Space) -> str | None:
    return None if space.rounding is not None else "nothing is rounded stochastically"


CHECKS = (Check("rounding", rounding, _applies, 1, 24, "the odds of stochastic rounding, its replay, its draws"),)
