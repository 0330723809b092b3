# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bounds of elementary functions hold whatever the error of their argument is, also where a function is flat at the
argument itself and not where the error reaches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from te_dispatch.conformance.bounds import elementary  # noqa: E402
from te_dispatch.conformance.bounds.known import Known  # noqa: E402


def _gelu(x: float) -> float:
    t = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + math.exp(-2 * t)) if t > -300 else 0.0


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


FUNCTIONS: dict[str, tuple[Callable[[Known], Known], Callable[[float], float]]] = {
    "logistic": (elementary.logistic, _sigmoid),
    "tanh": (elementary.tanh, math.tanh),
    "gelu": (elementary.gelu, _gelu),
    "silu": (lambda x: elementary.gated_logistic(x, 1.0), lambda x: x * _sigmoid(x)),
}
SIZES = st.floats(-12, 12).map(lambda exponent: 10.0**exponent)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(size=SIZES, negative=st.booleans(), error=SIZES, at=st.floats(-1, 1))
@example(size=1e3, negative=True, error=2e3, at=1.0)
@example(size=30.0, negative=True, error=60.0, at=1.0)
@example(size=10.0, negative=True, error=1.0, at=1.0)
def test_the_function_stays_within_its_bound_wherever_its_argument_may_be(
    name: str, size: float, negative: bool, error: float, at: float
) -> None:
    bound, exact = FUNCTIONS[name]
    x = -size if negative else size
    argument = Known(torch.tensor([x], dtype=torch.float64), torch.tensor([error], dtype=torch.float64))
    found = bound(argument)
    computed = float(torch.tensor(exact(x + at * error)).float())
    assert abs(computed - float(found.value)) <= float(found.error) * (1 + 1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(size=SIZES, negative=st.booleans())
def test_an_exact_argument_leaves_little_open(name: str, size: float, negative: bool) -> None:
    """Roundings of fp32 alone: 2^-16 of what is added, which for 1 + tanh is 1 times x."""
    bound, exact = FUNCTIONS[name]
    x = -size if negative else size
    found = bound(Known.exactly(torch.tensor([x], dtype=torch.float64)))
    assert float(found.error) <= 2.0**-16 * max(abs(x), abs(exact(x)), 1e-30)
