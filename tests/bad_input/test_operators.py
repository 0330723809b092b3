# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every operator and argument on both backends: spoilt, it is refused clearly with nothing written, or it works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core.operator import OPERATORS
from tests.bad_input import outcomes
from tests.bad_input.spoiling import spoilt
from tests.bad_input.valid_calls import CALLS

BACKENDS = ("torch", "reference")
CASES = [
    pytest.param(backend, call, argument, id=f"{backend}-{call}-{argument}".replace(" ", "_"))
    for backend in BACKENDS
    for call, (_, make) in CALLS.items()
    for argument in make()
]


def arguments(backend: str, call: str) -> dict[str, Any]:
    operator, make = CALLS[call]
    torch.manual_seed(0)
    found = make()
    if operator == "attention_bwd":
        names = OPERATORS["attention_fwd"].signature.parameters
        forward = {name: value for name, value in found.items() if name in names}
        with te_dispatch.using(attention_fwd=backend):
            result = ops.attention_fwd(**outcomes.duplicate(forward))
        found |= {"out": result.out, "lse": result.lse, "saved": result.saved}
    return found


def run(backend: str, call: str, given: dict[str, Any]) -> Any:
    operator = CALLS[call][0]
    with te_dispatch.using(**{operator: backend}):
        return getattr(ops, operator)(**given)


def test_there_is_a_valid_call_of_every_operator() -> None:
    assert {operator for operator, _ in CALLS.values()} == set(OPERATORS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_the_original_is_valid(backend: str, call: str) -> None:
    given = arguments(backend, call)
    results = [run(backend, call, given) for given in (given, arguments(backend, call))]
    assert outcomes.state(outcomes.numbers(results[0])) == outcomes.state(outcomes.numbers(results[1]))


@pytest.mark.parametrize(("backend", "call", "argument"), CASES)
def test_a_spoilt_argument_is_refused_clearly_or_works(backend: str, call: str, argument: str) -> None:
    original = arguments(backend, call)
    expected = run(backend, call, outcomes.duplicate(original))
    variants = list(spoilt(original[argument]))
    if OPERATORS[CALLS[call][0]].signature.parameters[argument].default is not None:
        variants.append(("None", None))
    problems = []
    for label, value in variants:
        given = outcomes.duplicate({**original, argument: value})
        before = outcomes.state(given)
        try:
            result = run(backend, call, given)
        except Exception as error:
            problem = outcomes.complaint(CALLS[call][0], error)
            if label.startswith("same: "):
                problem = f"refused what it should serve: {error}"
            if problem is None and outcomes.state(given) != before:
                problem = f"wrote before it refused: {error}"
        else:
            problem = _wrong(backend, call, label, given, original | {argument: value}, result, expected)
        if problem is not None:
            problems.append(f"{argument} = {label}: {problem}")
    assert not problems, "\n".join(problems)


def _wrong(
    backend: str, call: str, label: str, used: Any, given: dict[str, Any], result: Any, expected: Any
) -> str | None:
    """What is wrong with a result of a call that was not refused."""
    operator = OPERATORS[CALLS[call][0]]
    if label.startswith("same: "):
        if outcomes.description(result) != outcomes.description(expected):
            return f"another result: {outcomes.description(result)}"
        pairs = zip(outcomes.numbers(result), outcomes.numbers(expected))
        return None if all(_alike(a, b) for a, b in pairs) else "other numbers than the original's"
    if operator.name == "relayout_scales":
        return None  # its shapes are the implementation's own
    contract = operator.shape(**_full(operator, given))
    if operator.name == "attention_fwd":  # lse may be there or not in inference
        result, contract = result.out, contract.out
    if outcomes.description(result) != outcomes.description(contract):
        return f"gave {outcomes.description(result)}, the contract says {outcomes.description(contract)}"
    return None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the order of sums, which strides may change: a few units in the last place of the largest."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    spread = 64 * torch.finfo(a.dtype).eps * float(b.double().abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=spread, equal_nan=True)


def _full(operator: Any, given: dict[str, Any]) -> dict[str, Any]:
    bound = operator.signature.bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)
