# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled and masked softmax: csrc/softmax. Contracts: `te_dispatch.ops.softmax`."""

from __future__ import annotations

import torch

from te_dispatch.ops.checks import rows as checks
from te_dispatch_cuda.codes import DTYPES
from te_dispatch_cuda.memory import dense, empty, matrix_shape, stream_of
from te_dispatch_cuda.native import load

_native = load()


def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * x) over the last dimension in fp32; masked entries and fully masked rows are 0."""
    checks.softmax_fwd(x, mask, scale, out_dtype)
    shape, dtype, device = x.shape, x.dtype, x.get_device()
    x = dense(x)
    y = empty("result", tuple(shape), out_dtype or dtype, x.device)
    batch, heads = _leading(shape)
    address, strides = 0, (0, 0, 0, 0)
    if mask is not None:
        mask, strides = _mask_strides(mask, shape)
        address = mask.data_ptr()
    _native.softmax_fwd(
        device, stream_of(device), x.data_ptr(), address, y.data_ptr(), batch, heads, shape[-2], shape[-1], *strides,
        scale, causal, DTYPES[dtype], DTYPES[y.dtype],
    )  # fmt: skip
    return y


def _leading(shape: torch.Size) -> tuple[int, int]:
    """Dimensions before the last two, as (batch, heads)."""
    if len(shape) == 4:
        return shape[0], shape[1]
    heads = 1
    for size in shape[:-2]:
        heads *= size
    return 1, heads


def _mask_strides(mask: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The mask's stride along (batch, heads, s_q, s_kv) of x; the last one 0 or 1."""
    if len(shape) > 4 and mask.ndim > 2:  # more leading dimensions than there are strides
        mask = dense(mask.expand(shape)).view(-1, *shape[-2:])
        shape = mask.shape
    # Dimensions of size 1 are broadcast, or of no length either way.
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride())]
    if strides and strides[-1] not in (0, 1):
        return _mask_strides(dense(mask), shape)
    return mask, (*(0,) * (4 - len(strides)), *strides)


def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """scale * y * (dy - sum(dy * y)), in fp32."""
    checks.softmax_bwd(dy, y, scale, out_dtype)
    device = y.get_device()
    dy, y = dense(dy), dense(y)
    dx = empty("result", tuple(y.shape), out_dtype or y.dtype, y.device)
    _native.softmax_bwd(
        device, stream_of(device), dy.data_ptr(), y.data_ptr(), dx.data_ptr(), *matrix_shape(y), scale,
        DTYPES[dy.dtype], DTYPES[y.dtype], DTYPES[dx.dtype],
    )  # fmt: skip
    return dx
