# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every operator has a space, and level full gives every parameter of it more than one value."""

from __future__ import annotations

import dataclasses
import inspect
from itertools import chain
from typing import Any

import pytest
import torch

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.checks import checks
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import spaces
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import Saved

pytestmark = pytest.mark.sampled(5)

#: Parameters that a backward gets from its forward alone (`Space.forward`), so that no case makes them.
FROM_FORWARD = ("out", "lse", "saved")
_FIRST = 12


def _description(value: Any) -> Any:
    """What tells two values of a parameter apart: tags and sizes, not the numbers in tensors."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape))
    if isinstance(value, Quantized):
        return ("record", value.encoding, value.scaling, value.scale_layout, value.shape, value.row_data is None)
    if isinstance(value, Saved):
        return ("saved", value.format)
    if dataclasses.is_dataclass(value):
        fields = ((f.name, _description(getattr(value, f.name))) for f in dataclasses.fields(value))
        return (type(value).__name__, *fields)
    if isinstance(value, (list, tuple)):
        return tuple(_description(item) for item in value)
    return repr(value)


def _unexercised(operator: Operator) -> set[str]:
    """Parameters that have had fewer than two values once all of level full's cases were made."""
    left = {name: set[Any]() for name in operator.signature.parameters}
    if any(space.forward is not None for space in spaces(operator.name)):
        left = {name: seen for name, seen in left.items() if name not in FROM_FORWARD}
    of_each = [[(space, case) for case in cases_of(space, "full")] for space in spaces(operator.name)]
    # The first cases of each space before the rest of any: they mostly are enough.
    for space, case in chain(*(cases[:_FIRST] for cases in of_each), *(cases[_FIRST:] for cases in of_each)):
        arguments = space.make(case.values, Maker(case, scopes.MANAGER))
        for name in list(left):
            left[name].add(_description(arguments.get(name, operator.signature.parameters[name].default)))
            if len(left[name]) > 1:
                del left[name]
        if not left:
            return set()
    return set(left)


def _defaults(operator: Operator) -> dict[str, Any]:
    return {n: p.default for n, p in operator.signature.parameters.items() if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_operator_has_a_space(name: str) -> None:
    assert spaces(name), f"no space makes calls of {name}: add one in te_dispatch/conformance/families/"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPERATORS))
def test_every_parameter_has_two_values(name: str) -> None:
    left = _unexercised(OPERATORS[name])
    defaults = {n: d for n, d in _defaults(OPERATORS[name]).items() if n in left}
    assert not left, f"{name}: level full gives one value only to {sorted(left)} (defaults: {defaults})"


@pytest.mark.parametrize("space", spaces(), ids=lambda space: space.id)
def test_ids_read_back_and_cases_are_made_again(space: Any) -> None:
    """An id is enough to make the same bytes."""
    cases = cases_of(space, "full")[:2]
    assert cases or space.sampled
    for case in cases:
        again = Case.parse(case.id)
        assert again == case
        one, other = (space.make(c.values, Maker(c, scopes.MANAGER)) for c in (case, again))
        assert one.keys() == other.keys()
        for name in one:
            for a, b in zip(_tensors(one[name]), _tensors(other[name]), strict=True):
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def _tensors(value: Any) -> list[torch.Tensor]:
    from te_dispatch.conformance.transfer import tensors

    return [tensor.contiguous() for _, tensor in tensors(value)]


@pytest.mark.parametrize("space", [space for space in spaces() if space.checks], ids=lambda space: space.id)
def test_a_space_names_checks_that_there_are(space: Any) -> None:
    assert set(space.checks) <= {check.name for check in checks()}


@pytest.mark.parametrize("space", [space for space in spaces() if space.slow], ids=lambda space: space.id)
def test_smoke_has_no_case_that_takes_seconds(space: Any) -> None:
    assert cases_of(space, "full") and not cases_of(space, "smoke")


@pytest.mark.parametrize("space", spaces(), ids=lambda space: space.id)
def test_smoke_values_are_among_the_full_ones(space: Any) -> None:
    for axis in space.axes:
        assert set(axis.smoke) <= set(axis.values), axis.name
        assert not set(axis.soak) & set(axis.values), axis.name
