# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm: fp32 arithmetic, one rounding, casts from fp32. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import Planned, planned
from te_dispatch.numerics.quantized import row_count
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_cuda.blocks import block_record, scaling_code
from te_dispatch_cuda.codes import DTYPES, cast_code, state_of
from te_dispatch_cuda.memory import all_dense, dense, dense_or_none
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Given, Made, Record, launch

_native = load()
_F32, _U8 = torch.float32, torch.uint8
#: csrc/norm/arguments.h
_DELAYED, _CURRENT, _OF_BLOCKS = 1, 2, 2


def _forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    residual: torch.Tensor | None,
    quantizer: Quantizer | None,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
    centered: bool,
) -> Planned:
    """The call of contiguous x, residual, gamma and beta, and the quantizer's tensors."""
    shape, dtype = tuple(x.shape), out_dtype or x.dtype
    columns, rows = shape[-1], row_count(x)
    residual_out = None if residual is None else Made("residual_out", shape, x.dtype)
    y = Made("y", shape, dtype) if quantizer is None or with_y else None
    mean = Made("mean", shape[:-1], _F32) if centered else None
    rstd = Made("rstd", shape[:-1], _F32)
    arguments = [
        Given(0), DTYPES[x.dtype], rows, columns, Given(1), residual_out or 0, Given(2), DTYPES[gamma.dtype], Given(3),
        0 if beta is None else DTYPES[beta.dtype], zero_centered, eps, mean or 0, rstd, y or 0, DTYPES[dtype],
    ]  # fmt: skip
    tensors = (x, residual, gamma, beta, *state_of(quantizer))
    if quantizer is None:
        result = NormForward(y, None, residual_out, mean, rstd)  # type: ignore[arg-type]
        return launch("norm_forward", x.device, arguments, result, tensors)
    record, cast = _cast(quantizer, usage, shape, rows, columns, dtype, x.device)
    result = NormForward(y, record, residual_out, mean, rstd)  # type: ignore[arg-type]
    return launch("norm_forward_cast", x.device, arguments + cast, result, tensors)


def _cast(
    quantizer: Quantizer,
    usage: str,
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Record, list[Any]]:
    """The record that y becomes, and the arguments that say so."""
    code = cast_code(quantizer)
    # For a cast that makes y again: an amax, gamma and beta as floats, each padded (csrc/norm/arguments.h).
    workspace = Made("workspace", (4 + 2 * (-(-columns // 16) * 16),), _F32)
    if quantizer.scaling != "tensor":
        record = block_record(shape, rows, columns, dtype, device, quantizer, usage)  # type: ignore[arg-type]
        return record, [
            workspace, _OF_BLOCKS + scaling_code(quantizer), record.row_data or 0, record.col_data or 0, code, 0, 0,
            record.row_scale_inv or 0, record.col_scale_inv or 0, record.global_scale_inv or 0,
            getattr(quantizer, "epsilon", 0.0), getattr(quantizer, "power_of_two", False),
            getattr(quantizer, "two_d", False),
        ]  # fmt: skip
    wants_row, wants_column = usage != "column", usage != "row"
    row = Made("row_data", shape, _U8) if wants_row else None
    column = Made("col_data", (columns, rows), _U8) if wants_column else None
    scale_inv = Made("row_scale_inv" if wants_row else "col_scale_inv", (1,), _F32)
    record = Record(
        row, column, scale_inv if wants_row else None, scale_inv if wants_column else None, quantizer.encoding,
        "tensor", shape, dtype, device,
    )  # fmt: skip
    if isinstance(quantizer, DelayedQuantizer):
        return record, [
            workspace if wants_column else 0, _DELAYED, row or 0, column or 0, code, Given(4), Given(5), scale_inv, 0,
            0, 0.0, False, False,
        ]  # fmt: skip
    assert isinstance(quantizer, CurrentQuantizer)
    return record, [
        workspace, _CURRENT, row or 0, column or 0, code, 0, 0, scale_inv, 0, 0, quantizer.epsilon,
        quantizer.power_of_two, False,
    ]  # fmt: skip


@planned()
def layernorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward | Planned:
    """One pass over x, but for casts whose scales depend on more than a row: those read x again and recompute y."""
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    if not all_dense(x, gamma, beta, residual):
        return layernorm_fwd(
            dense(x), dense(gamma), dense_or_none(beta), eps=eps, zero_centered_gamma=zero_centered_gamma,
            residual=dense_or_none(residual), quantizer=quantizer, usage=usage, with_y=with_y, out_dtype=out_dtype,
        )  # fmt: skip
    return _forward(
        x, gamma, beta, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, True
    )  # fmt: skip


@planned()
def rmsnorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward | Planned:
    """The same without mean."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
    if not all_dense(x, gamma, residual):
        return rmsnorm_fwd(
            dense(x), dense(gamma), eps=eps, zero_centered_gamma=zero_centered_gamma, residual=dense_or_none(residual),
            quantizer=quantizer, usage=usage, with_y=with_y, out_dtype=out_dtype,
        )  # fmt: skip
    return _forward(
        x, gamma, None, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, False
    )  # fmt: skip


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
    add: torch.Tensor | None,
) -> Planned:
    """The call of contiguous tensors."""
    columns, rows, dtype = x.shape[-1], row_count(x), DTYPES[x.dtype]
    dx, dgamma = Made("dx", x.shape, x.dtype), Made("dgamma", (columns,), gamma.dtype)
    dbeta = None if mean is None else Made("dbeta", (columns,), gamma.dtype)
    parts = _native.norm_backward_parts(x.get_device(), rows, columns, dtype)
    arguments = (
        Given(0), DTYPES[dy.dtype], Given(1), dtype, rows, columns, Given(2), DTYPES[gamma.dtype], zero_centered,
        Given(3), Given(4), Given(5), 0 if add is None else DTYPES[add.dtype], dx, dgamma, dbeta or 0,
        Made("workspace", (parts, 1 if mean is None else 2, columns), _F32), parts,
    )  # fmt: skip
    result = NormBackward(dx, dgamma, dbeta)  # type: ignore[arg-type]
    return launch("norm_backward", x.device, arguments, result, (dy, x, gamma, mean, rstd, add))


@planned()
def layernorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward | Planned:
    """dx in one pass, which leaves partial sums of dgamma and dbeta for a second kernel."""
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, True)
    if not all_dense(dy, x, gamma, mean, rstd, add):
        return layernorm_bwd(
            dense(dy), dense(x), dense(gamma), dense(mean), dense(rstd), zero_centered_gamma=zero_centered_gamma,
            add=dense_or_none(add),
        )  # fmt: skip
    return _backward(dy, x, gamma, mean, rstd, zero_centered_gamma, add)


@planned()
def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward | Planned:
    """The same without mean."""
    checks.norm_bwd(dy, x, gamma, None, rstd, add, False)
    if not all_dense(dy, x, gamma, rstd, add):
        return rmsnorm_bwd(
            dense(dy), dense(x), dense(gamma), dense(rstd), zero_centered_gamma=zero_centered_gamma,
            add=dense_or_none(add),
        )  # fmt: skip
    return _backward(dy, x, gamma, None, rstd, zero_centered_gamma, add)
