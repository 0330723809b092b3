# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled and masked softmax over the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import Derived, fact
from te_dispatch.core.operator import operator

if TYPE_CHECKING:
    import torch


def _like(x: Any, out_dtype: torch.dtype | None) -> torch.Tensor:
    import torch

    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


@operator(
    family="softmax",
    version=1,
    shape=lambda x, mask=None, *, scale=1.0, causal=False, out_dtype=None: _like(x, out_dtype),
    device="x.device",
    sizes={"rows": "x.shape[-2]", "columns": "x.shape[-1]"},
    companion="softmax_bwd",
    companion_facts=lambda call: Derived(
        call,
        {
            "dy.dtype": fact("out_dtype", "x.dtype"),
            "y.dtype": fact("out_dtype", "x.dtype"),
            "out_dtype": fact("x.dtype"),
            "rows": fact("rows"),
            "columns": fact("columns"),
        },
    ),
)
def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = softmax(scale * x) over the last dimension in fp32, masked entries and fully masked rows 0.

    A row of which an entry that is not masked is NaN or +Inf is NaN where it is not masked, and 0 or NaN where it is. A
    row that has nothing above -Inf is 0.

    Args:
        x: (..., s_q, s_kv) float32, bfloat16 or float16.
        mask: bool, broadcastable to x, True = masked out.
        causal: also mask column j > row i.
        out_dtype: None for x's.
    """
    raise NotImplementedError


@operator(
    family="softmax",
    version=1,
    shape=lambda dy, y, *, scale=1.0, out_dtype=None: _like(y, out_dtype),
    device="y.device",
    sizes={"rows": "y.shape[-2]", "columns": "y.shape[-1]"},
    companion="softmax_fwd",
    backward=True,
)
def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """dx = scale * y * (dy - sum_j dy_j y_j), in fp32, rounded once.

    Args:
        dy, y: gradient and value of the forward's result.
        scale: the forward's.
        out_dtype: None for y's.
    """
    raise NotImplementedError
