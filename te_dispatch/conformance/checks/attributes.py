# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of an implementation's function that modules ask before they call it."""

from __future__ import annotations

from typing import Any

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks.values import SCALE_LAYOUTS
from te_dispatch.ops.gemm import LAYOUTS, checked_format


def operand_format(trial: Trial) -> None:
    """A product's ``operand_format``: possible for every layout and operand, and with scales in a layout that the
    contract has for records of the case's scaling, which relayout_scales can make."""
    arguments = trial.on_device()
    trial.claim(arguments)
    answer = _asked(trial.subject)
    assert answer is not None
    for name in "ab":
        operand = arguments[name]
        first = operand[0] if isinstance(operand, (list, tuple)) and operand else operand
        if not isinstance(first, Quantized):
            continue
        for layout in LAYOUTS:
            question = (layout, name, first.scaling)
            try:
                _, scales = checked_format(answer(*question), trial.subject.id, question)
            except ValueError as error:
                raise Failure(str(error)) from error
            served = [known for known, scalings in SCALE_LAYOUTS.items() if first.scaling in scalings]
            if scales not in served:
                raise Failure(
                    f"{trial.subject.id}: its operand_format asks for scales in layout {scales!r} for "
                    f"{', '.join(question)}, expected {' or '.join(served)}"
                )


def _asked(subject: Subject) -> Any:
    return subject.manager.functions.declared(subject.id, "operand_format")


def _applies(subject: Subject, space: Space) -> str | None:
    if not subject.operator.name.endswith("gemm"):
        return "no product"
    try:
        return None if _asked(subject) is not None else "reads the copies that all products do by default"
    except Exception:  # whose target cannot be imported: the check values says so
        return "cannot be imported"


CHECKS = (
    Check(
        "operand_format", operand_format, _applies, 1, 4, "which copies and scales a product says it reads", calls=False
    ),
)
