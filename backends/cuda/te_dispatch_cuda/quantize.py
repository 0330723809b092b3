# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts to FP8 and FP4, and the bookkeeping of scales. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch_cuda.casts import prepare_cast
from te_dispatch_cuda.codes import DTYPES, cast_facts
from te_dispatch_cuda.memory import dense, empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Calls, Given, Made, Record, prepare
from te_dispatch_cuda.sources import plain, readable

_native = load()
_F32 = torch.float32
_QUANTIZE, _QUANTIZE_DBIAS, _UPDATES = Calls(), Calls(), Calls()
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
    strides = None
    if not x.is_contiguous():
        x = readable(x)
        strides = x.stride()
    facts, state = cast_facts(quantizer)
    key = (x.shape, x.dtype, x.get_device(), usage, facts, amax is None, out is None, strides)
    call = _QUANTIZE.get(key) or _QUANTIZE.keep(
        key,
        prepare_cast(
            plain(x), tuple(x.shape), x.dtype, x.device, quantizer, usage, _record if out is None else _nothing,
            amax=amax is not None, into=out is not None,
        ),
    )  # fmt: skip
    given = state if amax is None else (*state, amax)
    if out is None:
        return call(x, *given)  # type: ignore[no-any-return]
    target = _dense_record(out)
    call(
        x, *given, noop_flag, target.row_data, target.row_scale_inv, target.col_data, target.col_scale_inv,
        target.global_scale_inv,
    )  # fmt: skip
    if target is not out:
        for name in _COPIES:
            written, asked = getattr(target, name), getattr(out, name)
            if written is not asked:
                asked.copy_(written)
    return out


def _record(record: Record) -> Record:
    return record


def _nothing(record: Record) -> None:
    return None


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


def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    """A cast and the sum over rows, in one pass and a short one over partial sums."""
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    strides = None
    if not x.is_contiguous():
        x = readable(x)
        strides = x.stride()
    facts, state = cast_facts(quantizer)
    key = (x.shape, x.dtype, x.get_device(), usage, facts, bias_dtype, strides)
    call = _QUANTIZE_DBIAS.get(key)
    if call is None:
        dbias = Made("dbias", x.shape[-1:], bias_dtype or x.dtype)
        call = prepare_cast(
            plain(x), tuple(x.shape), x.dtype, x.device, quantizer, usage, lambda record: QuantizeDbias(record, dbias),
            dbias=dbias,
        )  # fmt: skip
        _QUANTIZE_DBIAS.keep(key, call)
    return call(x, *state)  # type: ignore[no-any-return]


# What follows serves `te_dispatch.core.repeating`: calls that were just made, so that each is kept. A call for an x
# that looks like theirs has their key; the quantizer's tensors are the same ones.


def plan_quantize(
    varying: tuple[str, ...], x: torch.Tensor, quantizer: Quantizer, usage: str, out: Any, noop_flag: Any, amax: Any,
    rng_state: Any,
) -> Any:  # fmt: skip
    if varying != ("x",) or out is not None or amax is not None or noop_flag is not None or not x.is_contiguous():
        return None
    facts, state = cast_facts(quantizer)
    return _of_x(_QUANTIZE.get((x.shape, x.dtype, x.get_device(), usage, facts, True, True, None)), state)


def plan_quantize_dbias(
    varying: tuple[str, ...], x: torch.Tensor, quantizer: Quantizer, usage: str, bias_dtype: torch.dtype | None
) -> Any:
    if varying != ("x",) or not x.is_contiguous():
        return None
    facts, state = cast_facts(quantizer)
    return _of_x(_QUANTIZE_DBIAS.get((x.shape, x.dtype, x.get_device(), usage, facts, bias_dtype, None)), state)


def _of_x(call: Any, state: tuple[torch.Tensor | None, ...]) -> Any:
    if call is None or not state:
        return call
    scale, amax = state
    return lambda x: call(x, scale, amax)


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
    targets = (*histories, *scales) if amaxes is None else (*histories, *scales, *amaxes)
    held = [x if x.is_contiguous() else _with_columns_together(x) for x in targets]
    _update_call(held, max_values, algorithm, margin, amaxes is not None)(*held)
    for target, copy in zip(targets, held, strict=True):
        if copy is not target:
            target.copy_(copy)


def _update_call(
    held: Sequence[torch.Tensor], max_values: Sequence[Sequence[float]], algorithm: str, margin: int, amaxes: bool
) -> Any:
    lie = [(x.shape, x.stride()) for x in held[: len(max_values)]]
    key = (algorithm, margin, held[0].get_device(), not amaxes, *lie, *map(tuple, max_values))
    return _UPDATES.get(key) or _UPDATES.keep(key, _prepare_update(held, max_values, algorithm, margin, amaxes))


def plan_update_delayed_scales(
    varying: tuple[str, ...],
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    algorithm: str,
    margin: int,
    amaxes: Sequence[torch.Tensor] | None,
) -> Any:
    """The update of these very tensors (`te_dispatch.core.repeating`): looked at once, because they stay."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    held = (*histories, *scales) if amaxes is None else (*histories, *scales, *amaxes)
    if varying or not held or not all(x.is_contiguous() for x in held):
        return None
    return partial(_update_call(held, max_values, algorithm, margin, amaxes is not None), *held)


def _with_columns_together(x: torch.Tensor) -> torch.Tensor:
    """x, if it is a matrix whose rows lie dense, or a dense copy."""
    return x if x.ndim == 2 and x.shape[1] and x.stride(1) == 1 else dense(x)


def _prepare_update(
    held: Sequence[torch.Tensor], max_values: Sequence[Sequence[float]], algorithm: str, margin: int, amaxes: bool
) -> Any:
    """A call with histories, scales, and amaxes or none: an entry for every run of columns with one maximum."""
    count = len(max_values)
    arguments: list[Any] = [algorithm == "most_recent"]
    for i, values in enumerate(max_values):
        length, columns = held[i].shape
        stride = held[i].stride(0) if length > 1 else columns
        for first, run, maximum in _runs(values):
            amax = Given(2 * count + i) if amaxes else 0
            arguments += [Given(i), Given(count + i), amax, length, stride, first, run, _scaled(maximum, margin)]
    return prepare("update_delayed_scales", held[0].device, arguments, None, tensors=len(held))


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
