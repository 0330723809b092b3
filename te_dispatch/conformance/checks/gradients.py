# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Gradients: a forward and its own backward, against the derivative of the forward's formula.

Along random directions v of an argument x the derivative of <dout, f(x)> is D = <dout, f'(x) v>; the backward's answer
is <dx, v>. D is that of the contract's formula in float64, differentiated automatically, so no backward formula is
believed, the oracle's neither. With limits L of dx, element by element, |<dx, v> - D| <= sum |v| L. L is what the
backward's own rules allow it for the operands it was given, plus what the roundings of the forward's results move
(`Pair.carried`), each within the limits of the forward's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance import transfer
from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.families.gradients import PAIRS, Pair, leaf
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.outputs import named_results
from te_dispatch.conformance.rules import Within
from te_dispatch.conformance.space import Arguments, Judged, Space, rules_for
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import Quantized

#: Directions per argument.
DIRECTIONS = 4


def gradients(trial: Trial) -> None:
    """Forward, its backward, and the derivative along random directions."""
    pair = PAIRS[trial.case.operator]
    given = _plain(trial.arguments(), pair)
    there = transfer.moved(given, trial.device)
    companion = trial.claim(there).companion
    result = trial.call(there)
    synchronize(trial)
    found = _on_host(named_results(trial.subject.operator, result, there))
    generator = torch.Generator().manual_seed(trial.case.random_seed)
    output = found[pair.output]
    dout = torch.randn(output.shape, generator=generator).to(output.dtype)
    behind = pair.arguments(there, result, dout.to(trial.device))
    backward = _backward(trial, pair, companion, behind)
    made = backward.call(behind)
    synchronize(trial)
    actual = _on_host(named_results(backward.operator, made, behind))
    host = transfer.moved(behind, "cpu")
    limits, shown = _limits(trial, pair.backward, host, actual)
    if pair.carried is not None:
        of_forward, _ = _limits(trial, pair.forward, given, found)
        for path, more in pair.carried(host, of_forward).items():
            limits[path] = limits[path] + more
    _compare(pair, given, host, dout, actual, limits, shown, generator)


def _plain(given: Arguments, pair: Pair) -> Arguments:
    """Without casts of results. Records are moved by the mixture of experts; what has a gradient is their values."""
    made = {name: value for name, value in given.items() if name not in pair.options}
    if pair.forward == "moe_permute" and isinstance(made["x"], Quantized):
        made["x"] = leaf(made["x"]).detach().to(made["x"].dtype)
    return made


def _on_host(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {path: tensor.detach().cpu() for path, tensor in results.items()}


def _backward(trial: Trial, pair: Pair, companion: str | None, behind: Arguments) -> Subject:
    """The forward's companion, or the same backend's first implementation that serves the call."""
    if companion is not None:
        found = trial.subject.companion(companion)
        refusal = found.claim(behind).refusal
        if refusal is not None:
            raise NotClaimed(f"{companion}: {refusal}")
        return found
    backend = trial.subject.id.partition(".")[0]
    for found in subjects(trial.subject.manager, OPERATORS[pair.backward], trial.device, backend):
        if found.claim(behind).refusal is None:
            return found
    raise NotClaimed(f"{backend} has no {pair.backward} for this call")


def _limits(
    trial: Trial, operator: str, arguments: Arguments, actual: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """What the operator's rules allow each result of this call, and where they say anything."""
    space = rules_for(operator, arguments)
    assert space is not None
    widen = transfer.widened(arguments) if space.widen else transfer.moved(arguments, "cpu")
    result, given = trial.oracle.call(space, transfer.moved(widen, trial.oracle.device))
    expected = _on_host(named_results(OPERATORS[operator], result, given))
    judged = Judged({}, transfer.moved(arguments, "cpu"), expected, actual, trial.subject.traits, trial.subject.claims)
    limits: dict[str, torch.Tensor] = {}
    shown: dict[str, torch.Tensor | None] = {}
    for path, rule in space.rules(judged).items():
        exact = torch.zeros(expected[path].shape, dtype=torch.float64)
        limits[path] = rule.limit.expand(exact.shape) if isinstance(rule, Within) else exact
        for other in getattr(rule, "instead", ()):
            limits[path] = torch.where(other.where, torch.inf, limits[path])
        shown[path] = getattr(rule, "only", None)
    return limits, shown


def _compare(
    pair: Pair,
    given: Arguments,
    behind: Arguments,
    dout: torch.Tensor,
    actual: Mapping[str, torch.Tensor],
    limits: Mapping[str, torch.Tensor],
    shown: Mapping[str, torch.Tensor | None],
    generator: torch.Generator,
) -> None:
    # Where a residual was added, what was normalized is the sum: the backward's x.
    at = {**given, **({"x": behind["x"]} if pair.backward.endswith("norm_bwd") else {})}
    wanted = {path: name for path, name in pair.gradients.items() if path in actual and at.get(name) is not None}
    leaves = {name: leaf(at[name]) for name in wanted.values()}
    output = pair.formula(leaves, given, behind)
    grads = torch.autograd.grad(output, list(leaves.values()), dout.double(), allow_unused=True)
    for (path, name), exact in zip(wanted.items(), grads):
        x = leaves[name]
        exact = torch.zeros_like(x) if exact is None else exact
        got, limit, only = actual[path].double(), limits[path], shown[path]
        finite = got.isfinite() & exact.isfinite() & limit.isfinite()
        finite = finite if only is None else finite & only
        for _ in range(DIRECTIONS):
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64) * finite
            one, other = ((g.nan_to_num(0.0) * direction).sum() for g in (got, exact))
            allowed = float((direction.abs() * limit.nan_to_num(0.0, 0.0)).sum())
            if not abs(float(one - other)) <= allowed:
                raise Failure(
                    f"{path}: along a random direction {name} changes <dout, {pair.output}> by {float(other):.9g}, its "
                    f"gradient says {float(one):.9g}, which is not within {allowed:.3g}"
                )


def _applies(subject: Subject, space: Space) -> str | None:
    if space.operator not in PAIRS:
        return "no forward of a pair"
    if space.sampled:
        return "too large to be differentiated"
    if space.operator == "attention_fwd" and (space.dropout is not None or any(a.name == "page" for a in space.axes)):
        return "no backward, or one behind a mask that the check `dropout` knows"
    return None


CHECKS = (Check("gradients", gradients, _applies, 1, 8, "a forward and its backward against the formula's derivative"),)
