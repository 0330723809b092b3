# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of anything that `sources` describes, as planned calls: what `quantize` and fused operators cast through.

Tensors of such a call, in this order: the source's; those of the quantizer (`codes.state_of`); the amax, where one is
given; where a record is written into, noop_flag (or None), then its row_data, row_scale_inv, col_data, col_scale_inv
and global_scale_inv (each may be None).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import Planned
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch_cuda.blocks import block_cast, block_record
from te_dispatch_cuda.codes import DTYPES, cast_code, state_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Given, Made, Record, launch
from te_dispatch_cuda.sources import Source

_native = load()
_F32, _U8 = torch.float32, torch.uint8
_MAXIMA: int = _native.MAXIMA
_TILE_ROWS: int = _native.TILE_ROWS


def cast(
    source: Source,
    read: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantizer: Quantizer,
    usage: str,
    result: Callable[[Record], Any],
    *,
    amax: torch.Tensor | None = None,
    into: Sequence[torch.Tensor | None] | None = None,
    out: Made | None = None,
    dbias: Made | None = None,
) -> Planned:
    """The cast of a source.

    Args:
        read: the source's tensors.
        shape, dtype: logical shape and nominal dtype of the record.
        result: from the record to what the call returns.
        amax: the tensor's, with a current or nvfp4 quantizer.
        into: noop_flag and the tensors of a dense record to write into.
        out: receives the values themselves, rounded once.
        dbias: (columns,): receives the values' sum over rows.
    """
    device, state = read[0].device, len(read)
    tensors: list[torch.Tensor | None] = [*read, *state_of(quantizer)]
    amax_at = noop_at = None
    if amax is not None:
        amax_at = Given(len(tensors))
        tensors.append(amax)
    if into is not None:
        noop_at = None if into[0] is None else Given(len(tensors))
        tensors += into
        row, row_scale, column, column_scale, whole = (Given(i) for i in range(len(tensors) - 5, len(tensors)))
        record = Record(
            row, column, row_scale, column_scale, quantizer.encoding, quantizer.scaling, shape, dtype, device, whole,
            quantizer.scale_layout,
        )  # fmt: skip
    elif quantizer.scaling == "tensor":
        record = _tensor_record(source, shape, dtype, device, quantizer, usage)
    else:
        record = block_record(shape, source[2], source[3], dtype, device, quantizer, usage)  # type: ignore[arg-type]
    if quantizer.scaling == "tensor":
        name = "cast_tensor"
        arguments = _tensor_cast(source, state, record, quantizer, usage, amax_at, noop_at, dbias, out)
    else:
        name = "block_cast"
        arguments = block_cast(source, record, quantizer, usage, amax_at, noop_at, dbias, out)  # type: ignore[arg-type]
    return launch(name, device, arguments, result(record), tensors)


def _tensor_record(
    source: Source, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, quantizer: Quantizer, usage: str
) -> Record:
    """What a cast with one scale makes, which both copies share."""
    scale_inv = Made("col_scale_inv" if usage == "column" else "row_scale_inv", (1,), _F32)
    row = row_scale = column = column_scale = None
    if usage != "column":
        row, row_scale = Made("row_data", shape, _U8), scale_inv
    if usage != "row":
        column, column_scale = Made("col_data", (source[3], source[2]), _U8), scale_inv
    return Record(row, column, row_scale, column_scale, quantizer.encoding, "tensor", shape, dtype, device)


def _tensor_cast(
    source: Source,
    state: int,
    record: Record,
    quantizer: Quantizer,
    usage: str,
    amax: Given | None,
    noop: Given | None,
    dbias: Made | None,
    out: Made | None,
) -> list[Any]:
    """Arguments of the native call; `state`: where the quantizer's tensors are."""
    scale: Any = 0
    recorded: Any = 0
    find_amax, epsilon, power_of_two = False, 0.0, False
    if quantizer.kind == "delayed":
        scale, recorded = Given(state), Given(state + 1)
    else:
        find_amax, epsilon, power_of_two = amax is None, quantizer.epsilon, quantizer.power_of_two  # type: ignore[union-attr]
    row = (record.row_data, record.row_scale_inv) if usage != "column" else (0, 0)
    column = (record.col_data, record.col_scale_inv) if usage != "row" else (0, 0)
    # One scale_inv is written once.
    column_scale = 0 if column[1] is row[1] else column[1]
    return [
        *source, row[0], column[0], 0 if out is None else out, 0 if out is None else DTYPES[out.dtype],
        cast_code(quantizer), scale, find_amax, 0 if amax is None else amax, epsilon, power_of_two, row[1],
        column_scale, recorded, 0 if noop is None else noop, 0 if dbias is None else dbias,
        0 if dbias is None else DTYPES[dbias.dtype], _workspace(source, find_amax, dbias),
    ]  # fmt: skip


def evaluation(
    source: Source, read: Sequence[torch.Tensor], out: Made | None, dbias: Made | None, result: Any
) -> Planned:
    """The values of a source themselves, and their sum over rows: a cast without codes."""
    arguments = [
        *source, 0, 0, 0 if out is None else out, 0 if out is None else DTYPES[out.dtype], 0, 0, False, 0, 0.0, False,
        0, 0, 0, 0, 0 if dbias is None else dbias, 0 if dbias is None else DTYPES[dbias.dtype],
        _workspace(source, False, dbias),
    ]  # fmt: skip
    return launch("cast_tensor", read[0].device, arguments, result, read)


def _workspace(source: Source, find_amax: bool, dbias: Made | None) -> Any:
    """For partial maxima, then for partial sums (csrc/quantize/quantize.h); 0 where neither is wanted."""
    if not find_amax and dbias is None:
        return 0
    size = _MAXIMA if find_amax else 1  # never without an address
    if dbias is not None:
        size += -(-source[2] // _TILE_ROWS) * source[3]
    return Made("workspace", (size,), _F32)
