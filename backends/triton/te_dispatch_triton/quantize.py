# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts to FP8 and FP4, and amaxes. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.backend_kit.call_plans import WRITTEN_RECORD
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch_triton import configs, sums
from te_dispatch_triton.blocks import cast_blocks
from te_dispatch_triton.kernels import cast as kernels
from te_dispatch_triton.kernels.cast_columns import cast_columns
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.maxima import compute_amax, find_maxima
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.quantize_forms import laid_out
from te_dispatch_triton.records import empty_tensor_record
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import target_of

__all__ = ["cast", "compute_amax", "quantize", "quantize_dbias"]

_COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
#: Members of `out` that a cast writes, by usage; the others keep their contents, the padding of scales included.
_WRITTEN = {
    "row": ("row_data", "row_scale_inv", "global_scale_inv"),
    "column": ("col_data", "col_scale_inv", "global_scale_inv"),
    "both": _COPIES,
}
_line, _tiles, _columns = Kernel(kernels.cast_line), Kernel(kernels.cast_tiles), Kernel(cast_columns)


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
        return _made(x, quantizer, usage, noop_flag, amax)
    _written(x, quantizer, usage, out, noop_flag, amax)
    return out


@replayed("quantize")
def _made(
    x: torch.Tensor, quantizer: Quantizer, usage: str, noop_flag: torch.Tensor | None, amax: torch.Tensor | None
) -> Quantized:
    checks.quantize(x, quantizer, usage, None, noop_flag, amax)
    return cast(x, quantizer, usage, amax=amax)


@replayed("quantize", out=WRITTEN_RECORD)
def _written(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    out: Quantized,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    checks.quantize(x, quantizer, usage, out, noop_flag, amax)
    target = _dense_record(out)
    written = cast(x, quantizer, usage, into=target, noop_flag=noop_flag, amax=amax)
    if written is not out:
        for name in _WRITTEN[usage]:
            made, asked = getattr(written, name), getattr(out, name)
            if made is not asked:
                # Padding of scales that were laid out anew is zeros by now, and a skipped cast writes nothing.
                asked.copy_(made if noop_flag is None else torch.where(noop_flag != 0, asked, made))


def plan_quantize(varying: Sequence[str], **given: Any) -> Any:
    """Of calls without `out`."""
    if given.pop("out") is not None or given.pop("rng_state") is not None:
        return None
    return _made.plans.repeat(varying, **given)  # type: ignore[attr-defined]


def _dense_record(out: Quantized) -> Quantized:
    """out, or one with copies of what does not lie dense or canonical, contents included: a cast may be skipped."""
    out = laid_out(out, CANONICAL_SCALES, False)
    tensors = [getattr(out, name) for name in _COPIES]
    if all(t is None or t.is_contiguous() for t in tensors):
        return out
    row, column, row_scale, column_scale, whole = (None if t is None else dense(t) for t in tensors)
    return Quantized(
        row, column, row_scale, column_scale, out.encoding, out.scaling, out.scale_layout, out.shape, out.dtype,
        out.device, whole,
    )  # fmt: skip


@replayed()
def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    """A cast and the sum over rows, in one pass and a short one over partial sums."""
    checks.quantize_dbias(x, quantizer, usage, bias_dtype)
    dbias = empty("dbias", tuple(x.shape[-1:]), bias_dtype or x.dtype, x.device)
    return QuantizeDbias(cast(x, quantizer, usage, dbias=dbias), dbias)


def cast(
    x: torch.Tensor,
    quantizer: Quantizer,
    usage: str,
    *,
    into: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> Quantized:
    """`quantize` without its checks: what fused operators cast through where they do not cast themselves.

    Args:
        x: of any strides; its shape and dtype become the record's.
        into: a record of dense tensors and canonical scales to write into, and to return where the quantizer asks for
            such scales.
        dbias: (columns,): receives the values' sum over rows.
    """
    if not (x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1)):
        x = dense(x)
    if quantizer.scaling == "tensor":
        return _cast_tensor(x, quantizer, usage, into, noop_flag, amax, dbias)
    return cast_blocks(x, quantizer, usage, into=into, noop_flag=noop_flag, amax=amax, dbias=dbias)


class _Plan(NamedTuple):
    """How one kind of cast is launched. turns: programs a processor that take tiles in turns, 0 where each has one;
    constants: all but a count of stages, which comes last."""

    constants: tuple[Any, ...]
    config: Config
    height: int
    width: int
    stages: int
    turns: int


@cached()
def _plan(device: torch.device, form: str, encoding: str, common: bool, power_of_two: bool, count: int) -> _Plan:
    target = target_of(device)
    choice = configs.choose("quantize", form, target)
    c = choice.constants
    sizes = ("BLOCK",) if form == "line" else ("BM", "BN")
    height, width = c[sizes[0]], c[sizes[-1]]
    constants: tuple[Any, ...] = (encoding, common, target.conversion(encoding), power_of_two, count)
    if form[:5] == "fours":
        constants = ("tensor", *constants, height // 4, width)
    else:
        constants = (*constants, *(c[name] for name in sizes))
    return _Plan(constants, choice.config, height, width, c.get("STAGES", 0), c.get("PROGRAMS", 0))


def _by_fours(column: torch.Tensor | None, dbias: torch.Tensor | None, rows: int) -> bool:
    """Whether `cast_columns` serves: words of four codes are stored."""
    if rows % 4 or (column is None and dbias is None):
        return False
    return column is None or column.data_ptr() % 4 == 0


def _cast_tensor(
    x: torch.Tensor,
    quantizer: Any,
    usage: str,
    into: Quantized | None,
    noop_flag: torch.Tensor | None,
    amax: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Quantized:
    device, shape = x.device, tuple(x.shape)
    columns = shape[-1]
    size = x.numel()
    rows = size // columns if columns else 0
    row_inverse = column_inverse = None
    if into is None:
        into, row_inverse = empty_tensor_record(shape, x.dtype, device, quantizer, usage)
        row, column = into.row_data, into.col_data
    else:
        row = column = None
        if usage != "column":
            row, row_inverse = into.row_data, into.row_scale_inv
        if usage != "row":
            column, column_inverse = into.col_data, into.col_scale_inv
    scale = history = maxima = None
    epsilon, power_of_two, count = 0.0, False, 1
    if quantizer.kind == "delayed":
        scale, history = quantizer.scale, quantizer.amax
    else:
        epsilon, power_of_two, maxima = quantizer.epsilon, quantizer.power_of_two, amax
        if amax is None:
            maxima, count = find_maxima(x, rows, columns, noop_flag)
    partial = None
    if column is None and dbias is None and size and x.is_contiguous():
        plan = _plan(device, "line", quantizer.encoding, quantizer.common, power_of_two, count)
        _line(
            device, (-(-size // plan.height), 1, 1),
            (x, size, row, scale, maxima, epsilon, row_inverse, history, noop_flag), plan.constants, plan.config,
        )  # fmt: skip
        return into
    fours = _by_fours(column, dbias, rows)
    form = "tiles" if not fours else "fours" if dbias is None else "fours_sums"
    plan = _plan(device, form, quantizer.encoding, quantizer.common, power_of_two, count)
    down, across = -(-rows // plan.height), -(-columns // plan.width)
    stages = 0
    if fours:
        size = plan.height * plan.width * x.element_size()
        down, stages = configs.in_turns(target_of(device), down, across, plan.turns, plan.stages, size)
    if dbias is not None:
        partial = sums.workspace(down, columns, device)
    programs = down * across or 1
    stride = x.stride(0) if x.ndim == 2 else columns
    if fours:
        _columns(
            device, (programs, 1, 1),
            (
                x, stride, rows, columns, row, None, column, None, scale, maxima, epsilon, row_inverse, column_inverse,
                history, noop_flag, partial,
            ),
            (*plan.constants, stages), plan.config,
        )  # fmt: skip
    else:
        _tiles(
            device, (programs, 1, 1),
            (
                x, stride, rows, columns, row, column, scale, maxima, epsilon, row_inverse, column_inverse, history,
                noop_flag, partial,
            ),
            plan.constants, plan.config,
        )  # fmt: skip
    if dbias is not None:
        sums.finish(partial, down, dbias)
    return into
