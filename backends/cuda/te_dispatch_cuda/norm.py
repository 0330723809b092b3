# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm: fp32 arithmetic, one rounding, casts from fp32. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import row_count
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_cuda.blocks import block_record, scaling_code
from te_dispatch_cuda.codes import DTYPES, cast_code, cast_facts
from te_dispatch_cuda.memory import dense
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Calls, Given, Made, Record, prepare

_native = load()
_FORWARD, _BACKWARD = Calls(), Calls()
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
) -> NormForward:
    x, gamma = dense(x), dense(gamma)
    beta = None if beta is None else dense(beta)
    residual = None if residual is None else dense(residual)
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    key = _forward_key(x, gamma, beta, eps, zero_centered, residual is None, facts, usage, with_y, out_dtype, centered)
    call = _FORWARD.get(key) or _FORWARD.keep(
        key,
        _prepare_forward(x, gamma, beta, eps, zero_centered, residual, quantizer, usage, with_y, out_dtype, centered),
    )
    return call(x, residual, gamma, beta, *state)  # type: ignore[no-any-return]


def _forward_key(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    alone: bool,
    facts: Any,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
    centered: bool,
) -> tuple[Any, ...]:
    return (
        x.shape, x.dtype, x.get_device(), gamma.dtype, None if beta is None else beta.dtype, eps, zero_centered, alone,
        facts, usage, with_y, out_dtype, centered,
    )  # fmt: skip


def _prepare_forward(
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
) -> Any:
    """A call with x, residual, gamma and beta, and the quantizer's tensors."""
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
    if quantizer is None:
        result = NormForward(y, None, residual_out, mean, rstd)  # type: ignore[arg-type]
        return prepare("norm_forward", x.device, arguments, result, tensors=4)
    record, cast = _cast(quantizer, usage, shape, rows, columns, dtype, x.device)
    result = NormForward(y, record, residual_out, mean, rstd)  # type: ignore[arg-type]
    tensors = 4 + len(cast_facts(quantizer)[1])
    return prepare("norm_forward_cast", x.device, arguments + cast, result, tensors=tensors)


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
    dy, x, gamma, rstd = dense(dy), dense(x), dense(gamma), dense(rstd)
    mean = None if mean is None else dense(mean)
    add = None if add is None else dense(add)
    key = _backward_key(dy, x, gamma, mean, zero_centered, add)
    call = _BACKWARD.get(key)
    if call is None:
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
        call = _BACKWARD.keep(key, prepare("norm_backward", x.device, arguments, result, tensors=6))
    return call(dy, x, gamma, mean, rstd, add)  # type: ignore[no-any-return]


def _backward_key(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    zero_centered: bool,
    add: torch.Tensor | None,
) -> tuple[Any, ...]:
    return (
        x.shape, x.dtype, dy.dtype, gamma.dtype, x.get_device(), mean is None, zero_centered,
        None if add is None else add.dtype,
    )  # fmt: skip


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


# What follows serves `te_dispatch.core.repeating`: calls that were just made, so that each is kept. A call for tensors
# that look like theirs has their key; the quantizer's tensors are the same ones.


def plan_forward(varying: tuple[str, ...], **given: Any) -> Any:
    x, gamma, beta, quantizer = given["x"], given["gamma"], given.get("beta"), given["quantizer"]
    centered = "beta" in given
    if varying != (("x", "gamma", "beta") if centered else ("x", "gamma")) or given["residual"] is not None:
        return None
    if not all(t is None or t.is_contiguous() for t in (x, gamma, beta)):
        return None
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    call = _FORWARD.get(
        _forward_key(
            x, gamma, beta, given["eps"], given["zero_centered_gamma"], True, facts, given["usage"], given["with_y"],
            given["out_dtype"], centered,
        )
    )  # fmt: skip
    return None if call is None else lambda x, gamma, beta=None: call(x, None, gamma, beta, *state)


def plan_backward(varying: tuple[str, ...], zero_centered_gamma: bool, **given: Any) -> Any:
    centered, add = "mean" in given, given["add"]
    tensors = ("dy", "x", "gamma", "mean", "rstd") if centered else ("dy", "x", "gamma", "rstd")
    if varying != (tensors if add is None else (*tensors, "add")):
        return None
    if not all(t is None or t.is_contiguous() for t in given.values()):
        return None
    call = _BACKWARD.get(
        _backward_key(given["dy"], given["x"], given["gamma"], given.get("mean"), zero_centered_gamma, add)
    )
    if call is None:
        return None
    if centered:
        return lambda dy, x, gamma, mean, rstd, add=None: call(dy, x, gamma, mean, rstd, add)
    return lambda dy, x, gamma, rstd, add=None: call(dy, x, gamma, None, rstd, add)
