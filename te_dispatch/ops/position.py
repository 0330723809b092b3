# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding (Su et al., "RoFormer", 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import Derived, fact
from te_dispatch.core.operator import operator

if TYPE_CHECKING:
    import torch


def _like(x: Any = None, *_: Any, dy: Any = None, **__: Any) -> torch.Tensor:
    x = dy if x is None else x
    import torch

    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    family="position",
    version=1,
    shape=_like,
    device="x.device",
    words={"layout": ("sbhd", "bshd", "thd")},
    sizes={"head_dim": "x.shape[-1]", "rotary_dim": "freqs.shape[-1]"},
    companion="rope_bwd",
    companion_facts=lambda call: Derived(
        call,
        {
            "dy.dtype": fact("x.dtype"),
            **{n: fact(n) for n in ("freqs.dtype", "layout", "interleaved", "head_dim", "rotary_dim")},
        },
    ),
)
def rope_fwd(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the first r features of every head by position-dependent angles.

    With t = freqs[position]: y = x cos t + rotate(x) sin t on the first r = freqs.shape[-1] features, the others
    pass. rotate maps [u, v] (halves) to [-v, u], or interleaved pairs (x0, x1) to (-x1, x0). Computed in fp32.

    Args:
        x: (s, b, h, d), (b, s, h, d) or (t, h, d), as `layout` says.
        freqs: float32 (s_max, 1, 1, r), angles per position, every angle twice as `RotaryPositionEmbedding` makes
            them (halves repeated, or pairs repeated if interleaved).
        layout: ``sbhd``, ``bshd`` or ``thd``.
        interleaved: pairing of features.
        cu_seqlens: int32 (b + 1,), thd only: positions restart at each sequence. Tokens behind the last one
            pass unrotated, or are rotated by the angles of position 0.
        offsets: int32 (b,): the position of each sequence's first token.
    """
    raise NotImplementedError


@operator(
    family="position",
    version=1,
    shape=_like,
    device="dy.device",
    words={"layout": ("sbhd", "bshd", "thd")},
    sizes={"head_dim": "dy.shape[-1]", "rotary_dim": "freqs.shape[-1]"},
    companion="rope_fwd",
    backward=True,
)
def rope_bwd(
    dy: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of `rope_fwd`: with R the rotate of the forward, dx = dy cos t - R(dy sin t); arguments as there."""
    raise NotImplementedError
