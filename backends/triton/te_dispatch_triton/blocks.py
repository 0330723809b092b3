# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts with a scale per block: block_1d, block_2d, mxfp8, nvfp4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton import configs, sums
from te_dispatch_triton.kernels import blocks_cast as kernels
from te_dispatch_triton.kernels.cast_columns import cast_columns
from te_dispatch_triton.kernels.cast_words import cast_words
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.maxima import find_maxima
from te_dispatch_triton.quantize_forms import laid_out
from te_dispatch_triton.records import BlockScaled, empty_record
from te_dispatch_triton.targets import target_of

_cast = Kernel(kernels.cast_blocks)
_squares, _crossed = Kernel(kernels.cast_squares), Kernel(kernels.cast_crossed)
_columns, _words = Kernel(cast_columns), Kernel(cast_words)


def cast_blocks(
    x: torch.Tensor,
    quantizer: BlockScaled,
    usage: str,
    *,
    into: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> Quantized:
    """Cast a tensor in one launch; before it one more where an nvfp4 cast has to find its amax, after it one for dbias.

    Args:
        x: contiguous, or 2-dimensional and dense in its rows.
        into: a record to write into, dense, with the copies that `usage` names and canonical scales; returned unless
            the quantizer asks for other scales.
        noop_flag: float32 (1,): nonzero writes nothing.
        amax: float32 (1,), nvfp4: the tensor's.
        dbias: (columns,): receives the sums over rows, accumulated in fp32.
    """
    device, shape, scaling = x.device, tuple(x.shape), quantizer.scaling
    rows, columns = rows_of(shape), shape[-1]
    record = empty_record(shape, rows, columns, x.dtype, device, quantizer, usage) if into is None else into
    epsilon, count, maxima, whole = 0.0, 1, None, None
    if scaling == "nvfp4":
        whole, maxima = record.global_scale_inv, amax
        if amax is None:
            maxima, count = find_maxima(x, rows, columns, noop_flag)
    elif scaling != "mxfp8":
        epsilon = quantizer.epsilon  # type: ignore[union-attr]
    row = row_scale = column = column_scale = None
    if usage != "column":
        row, row_scale = record.row_data, record.row_scale_inv
    if usage != "row":
        column, column_scale = record.col_data, record.col_scale_inv
    stride = x.stride(0) if x.ndim == 2 else columns
    form = scaling if scaling != "block_1d" or usage == "both" else f"block_1d_{usage}"
    fours = column is not None and rows % 4 == 0 and column.data_ptr() % 4 == 0
    if fours and (form == "block_2d" or (form == "block_1d" and _in_words(x, stride, columns, row))):
        form = f"fours_{form}"
    plan = _plan(device, quantizer, form, count)
    down, across = -(-rows // plan.height), -(-columns // plan.width)
    stages: tuple[int, ...] = ()
    if plan.kernel is _columns:
        size = plan.height * plan.width * x.element_size()
        down, count = configs.in_turns(target_of(device), down, across, plan.turns, plan.stages, size)
        stages = (count,)
    partial = None if dbias is None else sums.workspace(down, columns, device)
    programs = down * across * plan.programs
    if programs or whole is not None:
        matrix = (x, stride, rows, columns, row, row_scale, column, column_scale)
        rest = (epsilon, noop_flag, partial)
        if plan.kernel is _columns:
            args: tuple[Any, ...] = (*matrix, None, None, epsilon, None, None, None, noop_flag, partial)
        else:
            args = (*matrix, whole, maxima, *rest) if plan.kernel is _cast else (*matrix, *rest)
        plan.kernel(device, (programs or 1, 1, 1), args, (*plan.constants, *stages), plan.config)
    if dbias is not None:
        sums.finish(partial, down, dbias)
    return laid_out(record, quantizer.scale_layout, into is None)


def _in_words(x: torch.Tensor, stride: int, columns: int, row: torch.Tensor | None) -> bool:
    """Whether two elements make a word, and their codes 16 bits, in every row."""
    if x.element_size() != 2 or (columns | stride) % 2:
        return False
    return x.data_ptr() % 4 == 0 and row is not None and row.data_ptr() % 2 == 0


class _Plan(NamedTuple):
    """How one kind of cast is launched; height and width of a tile, programs for each; of `cast_columns` stages, and
    programs a processor that take tiles in turns, 0 where each has one."""

    kernel: Kernel
    constants: tuple[Any, ...]
    config: Config
    height: int
    width: int
    programs: int
    stages: int = 0
    turns: int = 0


def _plan(device: torch.device, quantizer: Any, form: str, count: int) -> _Plan:
    """form: a scaling, block_1d with both copies unless it says which; fours_: four rows at a time, in words."""
    scaling = quantizer.scaling
    two_d = scaling == "nvfp4" and quantizer.two_d
    power_of_two = scaling[:5] == "block" and quantizer.power_of_two
    return _planned(device, scaling, form, two_d, quantizer.encoding, quantizer.common, power_of_two, count)


@cached()
def _planned(
    device: torch.device,
    scaling: str,
    form: str,
    two_d: bool,
    encoding: str,
    common: bool,
    power_of_two: bool,
    count: int,
) -> _Plan:
    target = target_of(device)
    choice = configs.choose("quantize", form, target)
    c = choice.constants
    how = (encoding, common, target.conversion_of_cast(encoding), power_of_two)
    if form == "fours_block_2d":
        turns = (c.get("STAGES", 0), c.get("PROGRAMS", 0))
        return _Plan(_columns, (scaling, *how, 1, 32, 128), choice.config, 128, 128, 1, *turns)
    if form == "block_2d":
        return _Plan(_squares, (*how, c["BM"]), choice.config, 128, 128, 1)
    if "SPAN" in c:
        return _Plan(_crossed, (*how, c["SPAN"]), choice.config, 128, 128, 256 // c["SPAN"])
    if form == "fours_block_1d":
        return _Plan(_words, how, choice.config, 128, 128, 1)
    return _Plan(_cast, (scaling, two_d, *how, count, c["BM"], c["BN"]), choice.config, c["BM"], c["BN"], 1)
