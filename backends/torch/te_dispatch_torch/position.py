# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding. Contracts: `te_dispatch.ops.position`."""

from __future__ import annotations

import torch

from te_dispatch.ops.checks import rows as checks


def rope_fwd(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """x cos t + rotate(x) sin t on the first features."""
    angles = _angles(x, "x", freqs, layout, cu_seqlens, offsets)
    return _rotate_by(x, angles, interleaved, False)


def rope_bwd(
    dy: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """dy cos t - rotate(dy sin t) on the first features."""
    angles = _angles(dy, "dy", freqs, layout, cu_seqlens, offsets)
    return _rotate_by(dy, angles, interleaved, True)


def _angles(
    x: torch.Tensor,
    name: str,
    freqs: torch.Tensor,
    layout: str,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> torch.Tensor:
    """Angles (fp32), broadcastable to x's leading dimensions and the rotated features."""
    checks.rope(name, x, freqs, layout, cu_seqlens, offsets)
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1]).float()
    if layout == "thd":
        assert cu_seqlens is not None  # checked
        return table[_thd_positions(x, cu_seqlens, offsets)].unsqueeze(1)
    length = x.shape[0] if layout == "sbhd" else x.shape[1]
    if offsets is None:
        return table[:length, None, None] if layout == "sbhd" else table[:length, None]
    positions = torch.arange(length, device=x.device)
    if layout == "sbhd":
        return table[positions[:, None] + offsets].unsqueeze(2)
    return table[positions + offsets[:, None]].unsqueeze(2)


def _thd_positions(x: torch.Tensor, cu_seqlens: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    tokens = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp_max(cu_seqlens.shape[0] - 2)
    positions = tokens - cu_seqlens[sequence]
    if offsets is not None:
        positions = positions + offsets[sequence]
    # Tokens behind the last sequence belong to none, and there need be no angles for them: any position will do.
    return torch.where(tokens < cu_seqlens[-1], positions, 0)


def _rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def _rotate_by(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    rotated = angles.shape[-1]
    head = x[..., :rotated].float()
    cos, sin = angles.cos(), angles.sin()
    if backward:
        out = head * cos - _rotate(head * sin, interleaved)
    else:
        out = head * cos + _rotate(head, interleaved) * sin
    out = out.to(x.dtype).contiguous()
    return out if rotated == x.shape[-1] else torch.cat((out, x[..., rotated:]), -1)
