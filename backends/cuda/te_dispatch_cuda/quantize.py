# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts to FP8 and FP4, and the bookkeeping of scales. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import WRITTEN_RECORD, Planned, planned
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch_cuda.casts import cast
from te_dispatch_cuda.codes import DTYPES
from te_dispatch_cuda.memory import all_dense, dense, dense_or_none, empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Given, Made, Record, launch
from te_dispatch_cuda.sources import plain, readable

_native = load()
_F32 = torch.float32
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
    if out is None:
        return _made(x, quantizer, usage, noop_flag, amax)  # type: ignore[return-value]
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    target = _dense_record(out)
    _written(x, quantizer, usage, target, noop_flag, amax)
    for name in _COPIES if target is not out else ():
        written, asked = getattr(target, name), getattr(out, name)
        if written is not asked:
            asked.copy_(written)
    return out


@planned("quantize")
def _made(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> Quantized | Planned:
    checks.quantize(x, quantizer, usage, None, noop_flag, amax)
    source = readable(x)
    if source is not x:
        return _made(source, quantizer, usage, noop_flag, amax)
    return cast(plain(x), (x,), tuple(x.shape), x.dtype, quantizer, usage, _record, amax=amax)


@planned("quantize", out=WRITTEN_RECORD)
def _written(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    out: Quantized,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> Planned | None:
    """A cast into a dense record."""
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    source = readable(x)
    if source is not x:
        return _written(source, quantizer, usage, out, noop_flag, amax)
    into = (noop_flag, out.row_data, out.row_scale_inv, out.col_data, out.col_scale_inv, out.global_scale_inv)
    return cast(plain(x), (x,), tuple(x.shape), x.dtype, quantizer, usage, _nothing, amax=amax, into=into)


def _record(record: Record) -> Record:
    return record


def _nothing(record: Record) -> None:
    return None


def plan_quantize(varying: Sequence[str], **given: Any) -> Any:
    """Of calls without `out`: what is written is the same memory in every call otherwise."""
    if given.pop("out") is not None or given.pop("rng_state") is not None:
        return None
    return _made.plans.repeat(varying, **given)  # type: ignore[attr-defined]


def _dense_record(out: Quantized) -> Quantized:
    """out, or one with copies of what does not lie dense, contents included: a cast may be skipped."""
    tensors = [getattr(out, name) for name in _COPIES]
    if all_dense(*tensors):
        return out
    row, column, row_scale, column_scale, whole = map(dense_or_none, tensors)
    return Quantized(
        row, column, row_scale, column_scale, out.encoding, out.scaling, out.scale_layout, out.shape, out.dtype,
        out.device, whole,
    )  # fmt: skip


@planned()
def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias | Planned:
    """A cast and the sum over rows, in one pass and a short one over partial sums."""
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    source = readable(x)
    if source is not x:
        return quantize_dbias(source, quantizer, usage=usage, bias_dtype=bias_dtype)
    dbias = Made("dbias", x.shape[-1:], bias_dtype or x.dtype)
    return cast(
        plain(x), (x,), tuple(x.shape), x.dtype, quantizer, usage, lambda record: QuantizeDbias(record, dbias),  # type: ignore[arg-type]
        dbias=dbias,
    )  # fmt: skip


def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,)."""
    checks.compute_amax(x, out)
    x = dense(x)
    if out is None:
        out = empty("out", (1,), _F32, x.device)
    index = x.get_device()
    _native.compute_amax(index, stream_of(index), x.data_ptr(), DTYPES[x.dtype], x.numel(), out.data_ptr())
    return out


@planned()
def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> Planned | None:
    """End-of-step update of delayed scaling, in place: one launch for every 60 runs of columns with one maximum."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    lists = (histories, scales) if amaxes is None else (histories, scales, amaxes)
    held = [[x if x.is_contiguous() else _with_columns_together(x) for x in one] for one in lists]
    copies = [(x, copy) for one, copied in zip(lists, held) for x, copy in zip(one, copied) if copy is not x]
    if not copies:
        return _update(held, max_values, algorithm, margin)
    update_delayed_scales(
        held[0], held[1], max_values, algorithm=algorithm, margin=margin, amaxes=None if amaxes is None else held[2]
    )
    for target, copy in copies:
        target.copy_(copy)
    return None


def plan_update_delayed_scales(varying: Sequence[str], **given: Any) -> Any:
    """The update of these very tensors (`te_dispatch.core.repeating`): looked at once, because they stay."""
    lists = (given["histories"], given["scales"], given["amaxes"] or ())
    if varying or not given["histories"] or not all(all_dense(*one) for one in lists):
        return None
    return update_delayed_scales.plans.ahead(**given)  # type: ignore[attr-defined]


def _with_columns_together(x: torch.Tensor) -> torch.Tensor:
    """x, if it is a matrix whose rows lie dense, or a dense copy."""
    return x if x.ndim == 2 and x.shape[1] and x.stride(1) == 1 else dense(x)


def _update(
    lists: Sequence[Sequence[torch.Tensor]], max_values: Sequence[Sequence[float]], algorithm: str, margin: int
) -> Planned:
    """The call of histories, scales, and perhaps amaxes: an entry for every run of columns with one maximum."""
    held = [x for one in lists for x in one]
    count = len(max_values)
    arguments: list[Any] = [algorithm == "most_recent"]
    for i, values in enumerate(max_values):
        length, columns = held[i].shape
        stride = held[i].stride(0) if length > 1 else columns
        for first, run, maximum in _runs(values):
            amax = Given(2 * count + i) if len(lists) > 2 else 0
            arguments += [Given(i), Given(count + i), amax, length, stride, first, run, _scaled(maximum, margin)]
    return launch("update_delayed_scales", held[0].device, arguments, None, held)


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
