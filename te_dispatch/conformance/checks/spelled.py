# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The same arguments in other Python types: tuples for lists, integers for whole numbers."""

from __future__ import annotations

from typing import Any

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.memoized import call_again
from te_dispatch.conformance.transfer import moved
from te_dispatch.conformance.trial import Trial


def spelled(trial: Trial) -> None:
    """A call whose lists are tuples and whose whole numbers are integers, as callers write them."""
    given = moved(trial.arguments(), trial.device)
    other = {name: _other(value) for name, value in given.items()}
    changed = [name for name, value in other.items() if value is not given[name]]
    if not changed:
        trial.notes.append("no lists, and no whole numbers")
        return
    call_again(trial, other, f"with {', '.join(changed)} as tuples, or as integers: ")


def _other(value: Any) -> Any:
    if type(value) is list and not any(isinstance(item, list) for item in value):
        return tuple(value)
    if type(value) is float and value.is_integer():
        return int(value)
    return value


CHECKS = (Check("spelled", spelled, anywhere, 1, 2, "tuples for lists, and integers for whole numbers", of_forms=True),)
