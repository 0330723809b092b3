# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts, their inverses, and the bookkeeping of scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch.ops.shapes import ceil_div, rows_of
from te_dispatch_reference import casts, host
from te_dispatch_reference.encodings import encode
from te_dispatch_reference.scale_layouts import canonical_scales, to_layout

_TENSORS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


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
    """A set `noop_flag` skips the cast entirely: its amax is not recorded either."""
    checks.quantize(x, quantizer, usage, out, noop_flag, amax, rng_state)
    if noop_flag is not None and host.array(noop_flag).item() != 0:
        return out  # type: ignore[return-value]  # checked above
    draws = None if rng_state is None else casts.Draws(rng_state)
    made = casts.quantized(
        host.single(x), tuple(x.shape), quantizer, usage, x.dtype, x.device, amax, draws, x.dtype == torch.bfloat16,
        intermediate=out is not None,
    )  # fmt: skip
    if out is None:
        return made
    for name in _TENSORS:
        source, target = getattr(made, name), getattr(out, name)
        if source is None:
            continue
        if name == "global_scale_inv" and made.scaling == "nvfp4_rht":  # that of another copy stays
            written = slice(0 if made.row_data is not None else 1, 2 if made.col_data is not None else 1)
            source, target = source[written], target[written]
        target.copy_(source)
    return out


def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    made = quantize(x, quantizer, usage=usage)
    with np.errstate(invalid="ignore"):  # Inf and -Inf in one column
        sums = host.double(x).reshape(rows_of(tuple(x.shape)), x.shape[-1]).sum(0)
    return QuantizeDbias(made, host.result("dbias", sums, bias_dtype or x.dtype, x.device))


def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    checks.dequantize(x, dtype)
    return host.result("out", casts.single_values(x), dtype or x.dtype, x.device)


def transpose_quantized(x: Quantized) -> Quantized:
    checks.transpose_quantized(x)
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    codes = host.array(x.row_data).reshape(rows_of(x.shape), x.shape[-1])
    col_scale = x.row_scale_inv
    if x.scaling == "block_2d":
        col_scale = host.result("col_scale_inv", host.array(x.row_scale_inv).T, torch.float32, x.device)
    col_data = host.result("col_data", codes.T, torch.uint8, x.device)
    return _with(x, col_data=col_data, col_scale_inv=col_scale)


def _with(x: Quantized, **changes: object) -> Quantized:
    return Quantized(**{name: changes.get(name, getattr(x, name)) for name in Quantized.__slots__})  # type: ignore[arg-type]


def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """Column-wise mxfp8 scales are swizzled as (K, ceil(M/32)), the contracted dimension's blocks last.

    A swizzled result has the padded two-dimensional shape; its memory is the sequence of tiles.
    """
    checks.relayout_scales(x, scale_layout)

    def move(role: str, scales: torch.Tensor | None, column: bool) -> torch.Tensor | None:
        if scales is None or scale_layout == x.scale_layout:
            return scales
        moved = to_layout(canonical_scales(host.array(scales), x, column), scale_layout, x.scaling, column)
        return host.result(role, moved, scales.dtype, x.device)

    return _with(
        x,
        row_scale_inv=move("row_scale_inv", x.row_scale_inv, False),
        col_scale_inv=move("col_scale_inv", x.col_scale_inv, True),
        scale_layout=scale_layout,
    )


def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    checks.split_quantize(x, splits, quantizers, usage)
    return [quantize(p, q, usage=usage) for p, q in zip(torch.split(x, list(splits)), quantizers, strict=True)]


def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    checks.multi_tensor_quantize(xs, quantizers, usage)
    return [quantize(x, q, usage=usage) for x, q in zip(xs, quantizers, strict=True)]


def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    checks.compute_amax(x, out)
    amax = np.array([casts.amax_of(host.single(x))])
    if out is None:
        return host.result("out", amax, torch.float32, x.device)
    return host.write(out, amax)


def _blocks_of_shard(count: int, height: int, width: int, start: int, block: int) -> np.ndarray:
    """Flat index of the block that each element of a shard belongs to."""
    if block == 0:
        return np.zeros(count, np.int64)
    row, column = np.divmod(np.arange(start, start + count), max(width, 1))
    return (row // block) * ceil_div(width, block) + column // block


def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    checks.partial_amax(x, amax, height, width, start, block)
    index = _blocks_of_shard(x.numel(), height, width, start, block)
    before = host.single(amax)
    values = np.ascontiguousarray(casts.magnitudes(before))  # reshape is a view then
    np.maximum.at(values.reshape(-1), index, casts.magnitudes(host.single(x)))
    missed = np.ones(values.size, bool)
    missed[index] = False
    return host.write(amax, np.where(missed.reshape(values.shape), before, values))  # theirs, NaN or not


def partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    height: int,
    width: int,
    start: int,
    block: int,
    encoding: str,
) -> torch.Tensor:
    checks.partial_cast(x, out, scale, height, width, start, block, encoding)
    form = find_encoding(encoding)
    index = _blocks_of_shard(x.numel(), height, width, start, block)
    scaled = casts.times(host.single(x), host.single(scale).reshape(-1)[index])
    return host.write(out, encode(scaled, form, form.max, form.negative_zero))


def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    for i, (history, scale, max_value) in enumerate(zip(histories, scales, max_values, strict=True)):
        _update(history, scale, max_value, algorithm, margin, None if amaxes is None else amaxes[i])


def _update(
    history: torch.Tensor,
    scale: torch.Tensor,
    max_value: Sequence[float],
    algorithm: str,
    margin: int,
    used: torch.Tensor | None,
) -> None:
    old, old_scale = host.single(history), host.single(scale)
    seen = old[0] != 0  # NaN counts as seen
    amax = old[0] if algorithm == "most_recent" else casts.magnitudes(old).max(axis=0)
    numerator = np.ldexp(np.asarray(max_value, np.float64), -margin).astype(np.float32)
    usable = seen & np.isfinite(amax) & (amax > 0)
    with np.errstate(over="ignore"):
        computed = np.minimum(numerator / np.where(usable, amax, np.float32(1)), casts.LARGEST)
    if used is not None:
        host.write(used, np.where(usable, amax, host.single(used)))
    rolled = np.roll(old, -1, axis=0)
    rolled[0] = 0
    host.write(scale, np.where(usable, computed, old_scale))
    host.write(history, np.where(seen, rolled, old))


def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Codes that do not convert are looked for, under `error`, in the same copy that `count` counts: the row-wise
    one, or the column-wise where that is all there is.
    """
    checks.convert_encoding(x, encoding, overflow, count)
    source, target = find_encoding(x.encoding), find_encoding(encoding)
    codes = np.arange(256, dtype=np.uint8)
    magnitude, sign = codes & 0x7F, codes & 0x80
    if target.fnuz:
        too_large = np.zeros(256, bool)
        table = np.where(codes == 0x80, 0x00, np.where(magnitude > source.max_code, int(target.nan_code or 0), codes))
        factor = np.float32(2)
    else:
        too_large = (magnitude > target.max_code) & (codes != 0x80)
        table = np.where(codes == 0x80, int(target.nan_code or 0), np.where(too_large, target.max_code | sign, codes))
        factor = np.float32(0.5)
    counted = x.row_data if x.row_data is not None else x.col_data
    saturated = 0 if counted is None else int(too_large[host.array(counted)].sum())
    if saturated and overflow == "error":
        raise ValueError(f"overflow: {saturated} codes of x lie beyond the largest {encoding} value")
    if count is not None:
        host.write(count, host.array(count) + saturated)

    def convert(role: str, data: torch.Tensor | None) -> torch.Tensor | None:
        return (
            None if data is None else host.result(role, table[host.array(data)].astype(np.uint8), torch.uint8, x.device)
        )

    def rescale(role: str, scales: torch.Tensor | None) -> torch.Tensor | None:
        return (
            None
            if scales is None
            else host.result(role, casts.times(host.single(scales), factor), torch.float32, x.device)
        )

    row_scale = rescale("row_scale_inv", x.row_scale_inv)
    shared = x.col_scale_inv is not None and x.col_scale_inv is x.row_scale_inv
    return _with(
        x,
        row_data=convert("row_data", x.row_data),
        col_data=convert("col_data", x.col_data),
        row_scale_inv=row_scale,
        col_scale_inv=row_scale if shared else rescale("col_scale_inv", x.col_scale_inv),
        encoding=encoding,
    )


def _rows_in_padded(splits: Sequence[int], padded_splits: Sequence[int]) -> np.ndarray:
    """Where each unpadded row lies among the padded ones."""
    starts = np.cumsum([0, *padded_splits])
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, splits, strict=False)] or [np.arange(0)])


def pad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    checks.pad_rows(x, splits, padded_splits, False)
    source = host.raw(x)
    padded = np.zeros((sum(padded_splits), source.shape[1]), np.uint8)
    padded[_rows_in_padded(splits, padded_splits)] = source
    return host.from_raw("out", padded, (padded.shape[0], x.shape[1]), x.dtype, x.device)


def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    checks.pad_rows(x, splits, padded_splits, True)
    kept = host.raw(x)[_rows_in_padded(splits, padded_splits)]
    return host.from_raw("out", kept, (kept.shape[0], x.shape[1]), x.dtype, x.device)
