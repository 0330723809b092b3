# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of casts to MXFP8 in 32x32 tiles, and to NVFP4 whose blocks choose between 4 and 6."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantizers import MXFP8Quantizer
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Condition, table, when
from te_dispatch_torch import four_over_six
from te_dispatch_torch.encodings import decode, encode_

#: scaled, wanted, quantizer -> codes, scales of blocks, sums of errors.
Candidate = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _kind(name: str) -> Condition:
    return lambda call: call["quantizer"].kind == name


def _blocks_of_rows(call: Call) -> Any:
    quantizer = call["quantizer"]
    return call.sound(quantizer=MXFP8Quantizer(quantizer.encoding, quantizer.common))


def _column_apart(call: Call) -> Any:
    """The column-wise copy has blocks of 32x1."""
    made = call.sound()
    if made.col_data is not None and call["out"] is None:
        quantizer = call["quantizer"]
        column = MXFP8Quantizer(quantizer.encoding, quantizer.common)
        other = call.sound(quantizer=column, usage="column", rng_state=None)
        made.col_data.copy_(other.col_data)
        made.col_scale_inv.copy_(other.col_scale_inv)
    return made


def _first_line_alone(call: Call) -> Any:
    made = call.sound()
    scale = made.row_scale_inv
    if scale is not None and call["out"] is None and scale.shape[0] % 32 > 1:
        scale[scale.shape[0] // 32 * 32 + 1 :] = 127
    return made


def _with_halves(halves: Callable[[torch.Tensor, int], torch.Tensor]) -> Behaviour:
    def behave(call: Call) -> Any:
        with swapped(("four_over_six", "_halves", halves)):
            return call.sound()

    return behave


def _with_candidates(six: Candidate, four: Candidate) -> Behaviour:
    """Other candidates: they are made in turn, first that of 6."""

    def behave(call: Call) -> Any:
        made = []

        def candidate(*arguments: Any) -> Any:
            made.append(None)
            return (six if len(made) % 2 else four)(*arguments)

        with swapped(("four_over_six", "_candidate", candidate)):
            return call.sound()

    return behave


_right: Candidate = four_over_six._candidate


def _never_better(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros_like(x.narrow(dim, 0, 1))


def _first_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(1, 0, 1) if dim == 1 else x.sum(dim, keepdim=True)


def _a_little_better(scaled: Any, wanted: Any, quantizer: Any) -> Any:
    codes, block, error = _right(scaled, wanted, quantizer)
    return codes, block, torch.nextafter(error, torch.full_like(error, -torch.inf))


def _six_with_nan(scaled: Any, wanted: Any, quantizer: Any) -> Any:
    codes, block, error = _right(scaled, wanted, quantizer)
    return codes, block, error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _four_with_nan(scaled: Any, wanted: Any, quantizer: Any) -> Any:
    codes, block, error = _right(scaled, wanted, quantizer)
    return codes, block, error.nan_to_num(nan=-torch.inf, posinf=torch.inf)


def _rounded_twice(scaled: Any, wanted: Any, quantizer: Any) -> Any:
    """1.5 times the scale of 6 as its code reads."""
    six = decode(encode_(wanted / 1.5, "e4m3fn", 448.0, True), "e4m3fn")
    return _right(scaled, six * 1.5, quantizer)


def _saturated_apart(scaled: Any, wanted: Any, quantizer: Any) -> Any:
    """The scale of 4 wraps to half where 448 is too small for it."""
    return _right(scaled, torch.where(wanted > 448.0, wanted / 2, wanted), quantizer)


def _other_error(call: Call) -> Any:
    other = {"MAE": "MSE", "MSE": "MAE"}[call["quantizer"].error]
    return call.sound(quantizer=dataclasses.replace(call["quantizer"], error=other))


def _other_span(call: Call) -> Any:
    return call.sound(quantizer=dataclasses.replace(call["quantizer"], scale_max=448))


_TILES, _CHOICE = _kind("mxfp8_2d"), _kind("nvfp4_4over6")

FAULTS: tuple[Fault, ...] = table("quantize", {
    "tiles_cast_in_blocks": ("casts MXFP8 tiles in blocks of 1x32", when(_TILES, _blocks_of_rows)),
    "tiles_cast_columns_apart": (
        "makes the column-wise copy of MXFP8 tiles with scales of its own", when(_TILES, _column_apart)),
    "tiles_scale_first_line_of_partial_ones": (
        "gives only the first line of a partial MXFP8 tile the tile's scale", when(_TILES, _first_line_alone)),
    "four_over_six_takes_six": ("maps every block to 6", when(_CHOICE, _with_halves(_never_better))),
    "four_over_six_reads_first_row_of_tiles": (
        "chooses a 16x16 tile's scale by the errors of its first row", when(_CHOICE, _with_halves(_first_row))),
    "four_over_six_takes_four_on_ties": (
        "maps a block to 4 where both errors are equal", when(_CHOICE, _with_candidates(_right, _a_little_better))),
    "four_over_six_takes_four_for_nan": (
        "maps blocks that hold a NaN to 4", when(_CHOICE, _with_candidates(_six_with_nan, _four_with_nan))),
    "four_over_six_rounds_scale_twice": (
        "makes the scale of 4 of the rounded scale of 6", when(_CHOICE, _with_candidates(_right, _rounded_twice))),
    "four_over_six_wraps_scales": (
        "halves scales of 4 that are beyond 448", when(_CHOICE, _with_candidates(_right, _saturated_apart))),
    "four_over_six_takes_other_measure": (
        "compares magnitudes where it is asked for squares, and the other way round", when(_CHOICE, _other_error)),
    "four_over_six_ignores_span": ("spans 448 whatever is asked for", when(_CHOICE, _other_span)),
})  # fmt: skip
