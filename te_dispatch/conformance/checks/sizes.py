# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Cases beyond the sizes at which kernels change how they sum: a claim about bits holds there too."""

from __future__ import annotations

import dataclasses

from te_dispatch.conformance.space import Space
from te_dispatch.conformance.trial import NotClaimed, Trial
from te_dispatch.core.errors import Declined

#: Rows of a call. Halved again and again, they pass 258, 129, 64, 32, 16, 8, 4, 2 and 1; 136, 68, 34 and 17; 120, 60,
#: 30, 15, 7 and 3.
ROWS = (516, 272, 240)
#: Columns of rows, and the other two sizes of a product: n, and a k that libraries split.
COLUMNS, PRODUCT = 1040, (48, 2048)


#: Axes that say the dtype of a result. In fp32 another order of summation shows; rounded to 16 bits it hardly does.
_OF_RESULTS = ("out", "out_dtype", "weights")


def enlarged(trial: Trial, rows: int = ROWS[0]) -> Trial | None:
    """The trial's case with so many rows, columns to match, and results in fp32 if the subject serves that.

    None where its space has no such sizes, where the case's other values do not allow them, or where the subject does
    not serve the call.
    """
    values, space = trial.case.values, trial.space
    for axis in ("shape", "shapes"):
        shape = _shape(space, values[axis], rows) if axis in values else None
        if shape is None:
            continue
        known = {one.name: one.known for one in space.axes}
        precise = {name: "fp32" for name in _OF_RESULTS if name in values and "fp32" in known[name]}
        for more in (precise, {}):
            chosen = {**values, axis: shape, **more}
            if space.valid(chosen):
                case = dataclasses.replace(trial.case, axes=tuple(chosen.items()))
                larger = Trial(trial.subject, case, trial.oracle, space)
                if serves(larger):
                    return larger
    return None


def serves(trial: Trial) -> bool:
    """Whether dispatch would hand the case to the subject, and the subject takes it."""
    try:
        arguments = trial.on_device()
        trial.claim(arguments)
        trial.call(arguments)
    except (NotClaimed, Declined):
        return False
    return True


def shape_of(trial: Trial) -> str:
    """``shape=516x1040``, for messages."""
    return next(f"{name}={value}" for name, value in trial.case.axes if name in ("shape", "shapes"))


def _shape(space: Space, plain: str, rows: int) -> str | None:
    sizes = plain.partition("+")[0].split("x")
    if not all(size.isdigit() for size in sizes):
        return None
    if space.operator == "gemm":
        return "x".join(map(str, (rows, *PRODUCT)))
    if "+" in plain:  # a list of tensors
        return f"{rows}x{COLUMNS}+7+{rows}"
    if space.operator.startswith("attention"):  # sequences, queries, keys
        return f"{max(rows // 64, 2)}x130x264"
    if space.operator.startswith("rope"):  # s, b, h, d or b, s, h, d
        return f"{rows // 4}x4x3x64"
    return {2: f"{rows}x{COLUMNS}", 3: f"{rows // 4}x4x{COLUMNS}"}.get(len(sizes))
