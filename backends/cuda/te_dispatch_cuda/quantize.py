# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts to FP8 and FP4, and the bookkeeping of scales. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch_cuda.blocks import cast_blocks
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.memory import address, dense, empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.sources import Source, plain, readable

_native = load()
_F32, _U8 = torch.float32, torch.uint8
_MAXIMA: int = _native.MAXIMA
_TILE_ROWS: int = _native.TILE_ROWS
_COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


def quantize(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    usage: str,
    out: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Quantized:
    """Every cast of `te_dispatch.ops.quantize`; the manifest keeps `rng_state` away."""
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    x = readable(x)
    source, shape = plain(x), tuple(x.shape)
    if out is None:
        if quantizer.scaling == "tensor":
            return _cast_tensor(source, shape, x.dtype, x.device, quantizer, usage, None, None, amax, None, None)
        return cast(source, shape, x.dtype, x.device, quantizer, usage, amax=amax)
    target = _dense_record(out)
    cast(source, shape, x.dtype, x.device, quantizer, usage, into=target, noop_flag=noop_flag, amax=amax)
    if target is not out:
        for name in _COPIES:
            written, asked = getattr(target, name), getattr(out, name)
            if written is not asked:
                asked.copy_(written)
    return out


def _dense_record(out: Quantized) -> Quantized:
    """out, or one with copies of what does not lie dense, contents included: a cast may be skipped."""
    tensors = [getattr(out, name) for name in _COPIES]
    if all(t is None or t.is_contiguous() for t in tensors):
        return out
    row, column, row_scale, column_scale, whole = (None if t is None else dense(t) for t in tensors)
    return Quantized(
        row, column, row_scale, column_scale, out.encoding, out.scaling, out.scale_layout, out.shape, out.dtype,
        out.device, whole,
    )  # fmt: skip


def cast(
    source: Source,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer,
    usage: str,
    *,
    into: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> Quantized:
    """Cast the values of a source, as `quantize` says: what fused operators cast through.

    Args:
        source: what `sources` describes.
        shape, dtype: logical shape and nominal dtype of the result.
        into: a record of dense tensors to write into and return.
        out: dense, of `shape`: receives the values themselves, rounded to its dtype.
        dbias: (columns,): receives the values' sum over rows.
    """
    if quantizer.scaling == "tensor":
        return _cast_tensor(source, shape, dtype, device, quantizer, usage, into, noop_flag, amax, out, dbias)
    return cast_blocks(
        source,
        shape,
        dtype,
        device,
        quantizer,  # type: ignore[arg-type]
        usage,
        into=into,
        noop_flag=noop_flag,
        amax=amax,
        dbias=dbias,
        out=out,
    )


def _cast_tensor(
    source: Source,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer,
    usage: str,
    into: Quantized | None,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
    out: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Quantized:
    row = column = row_scale = column_scale = None
    row_data = row_inverse = column_data = column_inverse = 0
    if into is None:
        # One tensor, one scale: both copies share it.
        scale_inv = empty("col_scale_inv" if usage == "column" else "row_scale_inv", (1,), _F32, device)
        if usage != "column":
            row, row_scale = empty("row_data", shape, _U8, device), scale_inv
            row_data = row.data_ptr()
        if usage != "row":
            column, column_scale = empty("col_data", (source[3], source[2]), _U8, device), scale_inv
            column_data = column.data_ptr()
        row_inverse = scale_inv.data_ptr()
        into = Quantized(
            row, column, row_scale, column_scale, quantizer.encoding, "tensor", CANONICAL_SCALES, shape, dtype, device
        )
    else:
        if usage != "column":
            row_data, row_inverse = address(into.row_data), address(into.row_scale_inv)
        if usage != "row":
            column_data, column_inverse = address(into.col_data), address(into.col_scale_inv)
    scale = record = 0
    find_amax, epsilon, power_of_two = False, 0.0, False
    if quantizer.kind == "delayed":
        scale = quantizer.scale.data_ptr()  # type: ignore[union-attr]
        record = 0 if quantizer.amax is None else quantizer.amax.data_ptr()  # type: ignore[union-attr]
    else:
        find_amax, epsilon, power_of_two = amax is None, quantizer.epsilon, quantizer.power_of_two  # type: ignore[union-attr]
    workspace = _workspace(source, device, find_amax, dbias) if find_amax or dbias is not None else None
    index = device.index
    _native.cast_tensor(
        index, stream_of(index), *source, row_data, column_data, 0 if out is None else out.data_ptr(),
        0 if out is None else DTYPES[out.dtype], cast_code(quantizer), scale, find_amax,
        0 if amax is None else amax.data_ptr(), epsilon, power_of_two, row_inverse, column_inverse, record,
        0 if noop_flag is None else noop_flag.data_ptr(), 0 if dbias is None else dbias.data_ptr(),
        0 if dbias is None else DTYPES[dbias.dtype], 0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip
    return into


def evaluate(source: Source, device: torch.device, out: torch.Tensor | None, dbias: torch.Tensor | None) -> None:
    """The values of a source themselves, and their sum over rows: `cast` without a cast."""
    workspace = None if dbias is None else _workspace(source, device, False, dbias)
    index = device.index
    _native.cast_tensor(
        index, stream_of(index), *source, 0, 0, 0 if out is None else out.data_ptr(),
        0 if out is None else DTYPES[out.dtype], 0, 0, False, 0, 0.0, False, 0, 0, 0, 0,
        0 if dbias is None else dbias.data_ptr(), 0 if dbias is None else DTYPES[dbias.dtype],
        0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip


def _workspace(source: Source, device: torch.device, find_amax: bool, dbias: torch.Tensor | None) -> torch.Tensor:
    """For partial maxima, then for partial sums (csrc/quantize/quantize.h)."""
    size = _MAXIMA if find_amax else 1  # never without an address
    if dbias is not None:
        size += -(-source[2] // _TILE_ROWS) * source[3]
    return empty("workspace", (size,), _F32, device)


def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    """A cast and the sum over rows, in one pass and a short one over partial sums."""
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    x = readable(x)
    dbias = empty("dbias", x.shape[-1:], bias_dtype or x.dtype, x.device)
    return QuantizeDbias(cast(plain(x), tuple(x.shape), x.dtype, x.device, quantizer, usage, dbias=dbias), dbias)


def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,)."""
    checks.compute_amax(x, out)
    x = dense(x)
    if out is None:
        out = empty("out", (1,), _F32, x.device)
    index = x.get_device()
    _native.compute_amax(index, stream_of(index), x.data_ptr(), DTYPES[x.dtype], x.numel(), out.data_ptr())
    return out


def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    """End-of-step update of delayed scaling, in place: one launch for every 60 runs of columns with one maximum."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    entries: list[tuple[int, ...]] = []
    numerators: list[float] = []
    aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # (what does not lie dense, its copy that is worked on)

    def lying_dense(x: torch.Tensor) -> torch.Tensor:
        copy = dense(x)
        if copy is not x:
            aside.append((x, copy))
        return copy

    for i, history in enumerate(histories):
        length, columns = history.shape
        held = history if columns and history.stride(1) == 1 else lying_dense(history)
        scale = lying_dense(scales[i])
        amax = None if amaxes is None else lying_dense(amaxes[i])
        stride = held.stride(0) if length > 1 else columns
        for first, count, maximum in _runs(max_values[i]):
            entries.append((held.data_ptr(), scale.data_ptr(), address(amax), length, stride, first, count))
            numerators.append(_scaled(maximum, margin))
    index = histories[0].get_device()
    _native.update_delayed_scales(index, stream_of(index), entries, numerators, algorithm == "most_recent")
    for target, copy in aside:
        target.copy_(copy)


def _runs(values: Sequence[float]) -> list[tuple[int, int, float]]:
    """(first, count, value) of equal neighbours."""
    runs: list[tuple[int, int, float]] = []
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[first]:
            runs.append((first, i - first, values[first]))
            first = i
    return runs


def _scaled(maximum: float, margin: int) -> float:
    """maximum * 2^-margin; rounded to fp32 where it crosses into C++."""
    try:
        return math.ldexp(float(maximum), -margin)
    except OverflowError:
        return math.copysign(math.inf, maximum)
