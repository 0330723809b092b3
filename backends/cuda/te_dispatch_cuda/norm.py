# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm: fp32 arithmetic, one rounding, casts from fp32. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_cuda.blocks import empty_record
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.memory import address, dense, empty, stream_of
from te_dispatch_cuda.native import load

_native = load()
_F32, _U8 = torch.float32, torch.uint8
#: csrc/norm/arguments.h
_DELAYED, _CURRENT = 1, 2
_SCALINGS = {"block_1d": 3, "block_2d": 4, "mxfp8": 5, "nvfp4": 6}


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


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
) -> NormForward:
    shape, device, dtype = tuple(x.shape), x.device, out_dtype or x.dtype
    columns, rows = shape[-1], _rows(x)
    x, gamma = dense(x), dense(gamma)
    if beta is not None:
        beta = dense(beta)
    residual_out = None
    if residual is not None:
        residual = dense(residual)
        residual_out = empty("residual_out", shape, x.dtype, device)
    y = empty("y", shape, dtype, device) if quantizer is None or with_y else None
    mean = empty("mean", shape[:-1], _F32, device) if centered else None
    rstd = empty("rstd", shape[:-1], _F32, device)
    index = x.get_device()
    head = (
        index, stream_of(index), x.data_ptr(), DTYPES[x.dtype], rows, columns, address(residual),
        address(residual_out), gamma.data_ptr(), DTYPES[gamma.dtype], address(beta),
        0 if beta is None else DTYPES[beta.dtype], zero_centered, eps, address(mean), rstd.data_ptr(), address(y),
        DTYPES[dtype],
    )  # fmt: skip
    if quantizer is None:
        _native.norm_forward(*head)
        return NormForward(y, None, residual_out, mean, rstd)
    quantized = _cast(head, quantizer, usage, shape, rows, columns, dtype, device)
    return NormForward(y, quantized, residual_out, mean, rstd)


def _cast(
    head: tuple[Any, ...],
    quantizer: Quantizer,
    usage: str,
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Quantized:
    """The forward whose arguments are `head`, and the cast of its y."""
    code = cast_code(quantizer)
    if quantizer.scaling != "tensor":
        record = empty_record(shape, rows, columns, dtype, device, quantizer, usage)  # type: ignore[arg-type]
        workspace = _workspace(columns, device)
        _native.norm_forward_cast(
            *head, workspace.data_ptr(), _SCALINGS[quantizer.scaling], address(record.row_data),
            address(record.col_data), code, 0, 0, address(record.row_scale_inv), address(record.col_scale_inv),
            address(record.global_scale_inv), getattr(quantizer, "epsilon", 0.0),
            getattr(quantizer, "power_of_two", False), getattr(quantizer, "two_d", False),
        )  # fmt: skip
        return record
    wants_row, wants_column = usage != "column", usage != "row"
    row = empty("row_data", shape, _U8, device) if wants_row else None
    column = empty("col_data", (columns, rows), _U8, device) if wants_column else None
    scale_inv = empty("row_scale_inv" if wants_row else "col_scale_inv", (1,), _F32, device)
    if isinstance(quantizer, DelayedQuantizer):
        workspace = _workspace(columns, device) if wants_column else None
        _native.norm_forward_cast(
            *head, address(workspace), _DELAYED, address(row), address(column), code, quantizer.scale.data_ptr(),
            address(quantizer.amax), scale_inv.data_ptr(), 0, 0, 0.0, False, False,
        )  # fmt: skip
    else:
        assert isinstance(quantizer, CurrentQuantizer)
        workspace = _workspace(columns, device)
        _native.norm_forward_cast(
            *head, workspace.data_ptr(), _CURRENT, address(row), address(column), code, 0, 0, scale_inv.data_ptr(), 0,
            0, quantizer.epsilon, quantizer.power_of_two, False,
        )  # fmt: skip
    return Quantized(
        row, column, scale_inv if wants_row else None, scale_inv if wants_column else None, quantizer.encoding,
        "tensor", CANONICAL_SCALES, shape, dtype, device,
    )  # fmt: skip


def _workspace(columns: int, device: torch.device) -> torch.Tensor:
    """For a cast that makes y again: an amax, gamma and beta as floats, each padded (csrc/norm/arguments.h)."""
    return empty("workspace", (4 + 2 * (-(-columns // 16) * 16),), _F32, device)


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
) -> NormForward:
    """One pass over x, but for casts whose scales depend on more than a row: those read x again and recompute y."""
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    return _forward(
        x, gamma, beta, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, True
    )  # fmt: skip


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
) -> NormForward:
    """The same without mean."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
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
) -> NormBackward:
    device, columns, rows = x.device, x.shape[-1], _rows(x)
    dy, x, gamma, rstd = dense(dy), dense(x), dense(gamma), dense(rstd)
    if add is not None:
        add = dense(add)
    dx = empty("dx", tuple(x.shape), x.dtype, device)
    dgamma = empty("dgamma", (columns,), gamma.dtype, device)
    dbeta = None
    if mean is not None:
        mean = dense(mean)
        dbeta = empty("dbeta", (columns,), gamma.dtype, device)
    index, dtype = x.get_device(), DTYPES[x.dtype]
    parts = _native.norm_backward_parts(index, rows, columns, dtype)
    workspace = empty("workspace", (parts, 1 if mean is None else 2, columns), _F32, device)
    _native.norm_backward(
        index, stream_of(index), dy.data_ptr(), DTYPES[dy.dtype], x.data_ptr(), dtype, rows, columns, gamma.data_ptr(),
        DTYPES[gamma.dtype], zero_centered, address(mean), rstd.data_ptr(), address(add),
        0 if add is None else DTYPES[add.dtype], dx.data_ptr(), dgamma.data_ptr(), address(dbeta),
        workspace.data_ptr(), parts,
    )  # fmt: skip
    return NormBackward(dx, dgamma, dbeta)


def layernorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """dx in one pass, which leaves partial sums of dgamma and dbeta for a second kernel."""
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, True)
    return _backward(dy, x, gamma, mean, rstd, zero_centered_gamma, add)


def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """The same without mean."""
    checks.norm_bwd(dy, x, gamma, None, rstd, add, False)
    return _backward(dy, x, gamma, None, rstd, zero_centered_gamma, add)
