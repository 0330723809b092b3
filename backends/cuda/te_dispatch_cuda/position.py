# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding: csrc/position. Contracts: `te_dispatch.ops.position`."""

from __future__ import annotations

import torch

from te_dispatch.ops.checks import rows as checks
from te_dispatch_cuda.codes import DTYPES
from te_dispatch_cuda.memory import dense, empty, stream_of
from te_dispatch_cuda.native import load

_native = load()


def rope_fwd(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """x cos t + rotate(x) sin t on the first features, in fp32; the others pass."""
    checks.rope("x", x, freqs, layout, cu_seqlens, offsets)
    return _rotated(x, freqs, layout, interleaved, cu_seqlens, offsets, False)


def rope_bwd(
    dy: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """dy cos t - rotate(dy sin t) on the first features, in fp32; the others pass."""
    checks.rope("dy", dy, freqs, layout, cu_seqlens, offsets)
    return _rotated(dy, freqs, layout, interleaved, cu_seqlens, offsets, True)


def _rotated(
    x: torch.Tensor,
    freqs: torch.Tensor,
    layout: str,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    backward: bool,
) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = dense(x)
    if freqs.stride(-1) != 1:
        freqs = dense(freqs)
    shape = tuple(x.shape)
    y = empty("result", shape, x.dtype, x.device)
    # Both as (tokens, batch, heads): sizes, then strides.
    strides = x.stride()
    if layout == "sbhd":
        tokens, batch, heads, features = shape
        apart = (*strides[:3], batch * heads * features, heads * features, features)
    elif layout == "bshd":
        batch, tokens, heads, features = shape
        apart = (strides[1], strides[0], strides[2], heads * features, tokens * heads * features, features)
    else:
        tokens, heads, features = shape
        batch, apart = 1, (strides[0], 0, strides[1], heads * features, 0, features)
    sequences, starts, firsts = 0, 0, 0
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens)
        sequences, starts = cu_seqlens.shape[0] - 1, cu_seqlens.data_ptr()
    if offsets is not None:
        offsets = dense(offsets)
        firsts = offsets.data_ptr()
    device = x.get_device()
    _native.rope(
        device, stream_of(device), x.data_ptr(), y.data_ptr(), freqs.data_ptr(), starts, firsts, tokens, batch, heads,
        features, freqs.shape[-1], freqs.shape[0], sequences, *apart, freqs.stride(0), interleaved, backward,
        DTYPES[x.dtype],
    )  # fmt: skip
    return y
