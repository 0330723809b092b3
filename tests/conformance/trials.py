# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations with a mistake, for checks to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.covering import product
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.space import find
from te_dispatch.conformance.subject import Subject, subject
from te_dispatch.conformance.trial import Trial
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS

#: (the right implementation, arguments) -> result.
Mistake = Callable[[Subject, Mapping[str, Any]], Any]


def mistaken(right: Subject, mistake: Mistake) -> Subject:
    """An implementation that is called through a mistake."""

    class Mistaken(Subject):
        def call(self, arguments: Mapping[str, Any]) -> Any:
            return mistake(right, arguments)

    return Mistaken(**{f.name: getattr(right, f.name) for f in fields(Subject)})


def case_of(operator: str, space: str, **values: str) -> Case:
    """The plainest case that the space allows with these axis values."""
    found = find(operator, space)
    unknown = set(values) - {axis.name for axis in found.axes}
    assert not unknown, unknown
    axes = {axis.name: (values[axis.name],) if axis.name in values else axis.values for axis in found.axes}
    return Case.of(operator, space, next(iter(product(axes, found.valid))))


def trial_of(case: Case, implementation: str, mistake: Mistake | None = None) -> Trial:
    found = subject(scopes.MANAGER, OPERATORS[case.operator], torch.device("cpu"), implementation)
    found = found if mistake is None else mistaken(found, mistake)
    return Trial(found, case, Oracle(scopes.MANAGER))
