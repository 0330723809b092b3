# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding in float64."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.ops.checks import rows as checks
from te_dispatch_reference import host
from te_dispatch_reference.host import F64, Array


def _rotate(x: F64, interleaved: bool) -> F64:
    """[u, v] -> [-v, u] by halves, or (x0, x1) -> (-x1, x0) by pairs."""
    if interleaved:
        return np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    u, v = np.split(x, 2, axis=-1)
    return np.concatenate([-v, u], axis=-1)


def _positions(
    x: torch.Tensor, layout: str, cu_seqlens: torch.Tensor | None, offsets: torch.Tensor | None
) -> tuple[Array, Array]:
    """The position of every token, shaped to index freqs into x's leading dimensions, and whether it has one."""
    if layout == "thd":
        assert cu_seqlens is not None  # checked
        bounds = host.array(cu_seqlens).astype(np.int64)
        tokens = x.shape[0]
        lengths = np.diff(bounds)
        batch = len(lengths)
    else:
        length, batch = (x.shape[0], x.shape[1]) if layout == "sbhd" else (x.shape[1], x.shape[0])
    first = np.zeros(batch, np.int64)
    if offsets is not None:
        first = host.array(offsets).astype(np.int64)
    if layout == "thd":
        position = np.zeros(tokens, np.int64)
        position[: bounds[-1]] = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - first, lengths)
        return position, np.arange(tokens) < bounds[-1]
    grid = first[None, :] + np.arange(length)[:, None]
    grid = grid if layout == "sbhd" else grid.T
    return grid, np.ones(grid.shape, bool)


def _angles(
    name: str,
    x: torch.Tensor,
    freqs: torch.Tensor,
    layout: str,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> tuple[F64, F64]:
    """cos and sin of every token's angles, broadcastable over heads."""
    checks.rope(name, x, freqs, layout, cu_seqlens, offsets)
    position, valid = _positions(x, layout, cu_seqlens, offsets)
    used = position[valid]
    table = host.double(freqs).reshape(freqs.shape[0], freqs.shape[-1])
    angles = np.zeros((*position.shape, freqs.shape[-1]))
    angles[valid] = table[used]
    return np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]


def rope_fwd(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens past the last sequence of thd pass unrotated."""
    cos, sin = _angles("x", x, freqs, layout, cu_seqlens, offsets)
    values = host.double(x)
    r = freqs.shape[-1]
    head = values[..., :r]
    with np.errstate(invalid="ignore"):
        values[..., :r] = head * cos + _rotate(head, interleaved) * sin
    return host.result("out", values, x.dtype, x.device)


def rope_bwd(
    dy: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    cos, sin = _angles("dy", dy, freqs, layout, cu_seqlens, offsets)
    values = host.double(dy)
    r = freqs.shape[-1]
    head = values[..., :r]
    with np.errstate(invalid="ignore"):
        values[..., :r] = head * cos - _rotate(head * sin, interleaved)
    return host.result("out", values, dy.dtype, dy.device)
