# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding in float64."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch_reference import host
from te_dispatch_reference.host import F64, Array

_LAYOUTS = ("sbhd", "bshd", "thd")


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
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: not given, expected int32 (b + 1,) for layout thd")
        bounds = host.array(cu_seqlens).astype(np.int64)
        tokens = x.shape[0]
        if bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or np.any(np.diff(bounds) < 0) or bounds[-1] > tokens:
            raise ValueError(f"cu_seqlens: got {bounds.tolist()}, expected to rise from 0 to at most {tokens}")
        lengths = np.diff(bounds)
        batch = len(lengths)
    elif cu_seqlens is not None:
        raise ValueError(f"cu_seqlens: given for layout {layout}, expected for thd only")
    else:
        length, batch = (x.shape[0], x.shape[1]) if layout == "sbhd" else (x.shape[1], x.shape[0])
    first = np.zeros(batch, np.int64)
    if offsets is not None:
        host.check_shape("offsets", offsets, (batch,))
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
    host.check_float(name, x)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(_LAYOUTS)}")
    if x.ndim != (3 if layout == "thd" else 4):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {', '.join(layout)}")
    if freqs.dtype != torch.float32:
        raise ValueError(f"freqs: got dtype {freqs.dtype}, expected float32")
    if freqs.ndim != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] > x.shape[-1] or freqs.shape[-1] % 2:
        raise ValueError(
            f"freqs: got shape {tuple(freqs.shape)}, expected (s_max, 1, 1, r), r even and at most {x.shape[-1]}"
        )
    position, valid = _positions(x, layout, cu_seqlens, offsets)
    used = position[valid]
    if used.size and (used.min() < 0 or used.max() >= freqs.shape[0]):
        raise ValueError(f"freqs: got {freqs.shape[0]} positions, expected positions {used.min()} to {used.max()}")
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
    values[..., :r] = head * cos - _rotate(head * sin, interleaved)
    return host.result("out", values, dy.dtype, dy.device)
