# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Other cases than a trial's: beyond the sizes at which kernels change how they sum, as a claim about bits holds there
too, and with other options."""

from __future__ import annotations

import dataclasses

from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.maker import DTYPES
from te_dispatch.conformance.space import Space, Values
from te_dispatch.conformance.trial import Trial
from te_dispatch.core.errors import Declined

#: Rows of a call. Halved again and again, they pass 258, 129, 64, 32, 16, 8, 4, 2 and 1; 136, 68, 34 and 17; 120, 60,
#: 30, 15, 7 and 3; 96, 48, 24, 12 and 6; 2,064 and 1,032.
ROWS = (516, 272, 240, 96, 2064)
#: Those of a device that is emulated, where a launch on the first of the others takes seconds.
EMULATED_ROWS = (240, 96)
#: Columns: a multiple of every vector's width; and of so many rows others, of which a call's last vector is not full.
#: With 4 of them, some rows alone are all finite, all kept or all zero.
COLUMNS, UNEVEN = 1040, {272: 1037, 240: 1036, 96: 4, 2064: 48}
#: The other two sizes of a product: n, and a k that libraries split.
PRODUCT = (48, 2048)


#: Axes that say the dtype of a result, which is that of operands where there is none of them. In fp32 another order of
#: summation shows; rounded to 16 bits it hardly does.
_OF_RESULTS = ("out", "out_dtype", "weights")
#: Axes that say how large a call is.
_SIZES = ("shape", "shapes", "rows", "columns", "lengths", "heads", "dims")


def enlarged(trial: Trial, rows: int = ROWS[0], sure: bool = True) -> Trial | None:
    """The trial's case with so many rows, columns to match, and results in fp32 if the subject serves that.

    None where its space has no such sizes, where the case's other values do not allow them, or where the subject does
    not serve the call.

    Args:
        sure: whether to make the call in order to know whether the subject serves it, or to go by what it claims.
    """
    values, space = trial.case.values, trial.space
    for axis in ("shape", "shapes"):
        shape = _shape(space, values[axis], rows) if axis in values else None
        if shape is None:
            continue
        known = {one.name: one.known for one in space.axes}
        of_results = [name for name in _OF_RESULTS if "fp32" in known.get(name, ())] or ["dtype"]
        precise = {name: "fp32" for name in of_results if "fp32" in known.get(name, ())}
        for more in (precise, {}):
            chosen = {**values, axis: shape, **more}
            if space.valid(chosen):
                larger = _of(trial, chosen)
                if serves(larger) if sure else claims(larger):
                    return larger
    return None


def flattened(trial: Trial) -> Trial | None:
    """The trial's case with a shape of two dimensions, where its space has one and the case has another."""
    values = trial.case.values
    known = next((axis.values for axis in trial.space.axes if axis.name == "shape"), ())
    flat = next((shape for shape in known if shape.count("x") == 1), None)
    if flat is None or values["shape"].count("x") == 1 or not trial.space.valid({**values, "shape": flat}):
        return None
    other = _of(trial, {**values, "shape": flat})
    return other if serves(other) else None


def varied(trial: Trial) -> Trial | None:
    """A case of the same sizes and dtypes, in which as many other axes as the subject serves have another value than in
    the trial's. None where none has."""
    space, chosen = trial.space, dict(trial.case.values)
    found: Trial | None = None
    for axis in space.axes:
        if axis.name in _SIZES or axis.name == "values" or not DTYPES.keys().isdisjoint(axis.values):
            continue
        for value in axis.values:
            changed = {**chosen, axis.name: value}
            if value == chosen[axis.name] or axis.is_dull(value) or not space.valid(changed):
                continue
            other = _of(trial, changed)
            if serves(other):
                found, chosen = other, changed
                break
    return found


def in_fp32(trial: Trial) -> Trial | None:
    """The trial's case with as many operands and results in fp32 as the subject serves: what rounds them to 16 bits on
    the way shows. None where it has them in fp32, or serves none."""
    space, chosen = trial.space, dict(trial.case.values)
    found: Trial | None = None
    for axis in space.axes:
        changed = {**chosen, axis.name: "fp32"}
        if "fp32" not in axis.values or chosen[axis.name] in ("fp32", "same") or not space.valid(changed):
            continue
        other = _of(trial, changed)
        if serves(other):
            found, chosen = other, changed
    return found


def _of(trial: Trial, values: Values) -> Trial:
    """The trial on another case of its space."""
    case = dataclasses.replace(trial.case, axes=tuple(values.items()))
    return Trial(trial.subject, case, trial.oracle, trial.space)


def claims(trial: Trial) -> bool:
    """Whether dispatch would hand the case to the subject."""
    try:
        trial.claim(trial.on_device())
    except NotClaimed:
        return False
    return True


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
    columns = UNEVEN.get(rows, COLUMNS)
    if "+" in plain:  # a list of tensors
        return f"{rows}x{columns}+7+{rows}"
    if space.operator.startswith("attention"):  # sequences, queries, keys
        return f"{max(rows // 64, 2)}x{130 + rows % 2}x264"
    if space.operator.startswith("rope"):  # s, b, h, d or b, s, h, d
        return f"{rows // 4}x4x3x64"
    # 3 in a row of rows: an odd number of rows, and one that 4 does not divide, are among the halves.
    return {2: f"{rows}x{columns}", 3: f"{rows // 3}x3x{columns}", 4: f"{rows // 6}x2x3x{columns}"}.get(len(sizes))
