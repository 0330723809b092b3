# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A stand-in for AITER in tests: the functions that te_dispatch_rocm calls, with AITER's names, parameters and demands,
in PyTorch and on any device. What it computes is what AITER documents; how AITER rounds on the way, it does not show.
"""

from __future__ import annotations

import torch

from aiter.ops.mha import flash_attn_func as flash_attn_func

_CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_BLOCK = 128


def gemm_a8w8_blockscale(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    isBpreshuffled: bool = False,
) -> torch.Tensor:
    """XQ (m, k) times the transpose of WQ (n, k), with x_scale (m, k / 128) and w_scale (n / 128, k / 128)."""
    (m, k), (n, k_w) = XQ.shape, WQ.shape
    assert dtype in (torch.bfloat16, torch.float16) and XQ.dtype == WQ.dtype and XQ.dtype in _CODES
    assert k == k_w and not k % _BLOCK and not isBpreshuffled
    assert x_scale.shape == (m, k // _BLOCK) and w_scale.shape == (-(-n // _BLOCK), k // _BLOCK)
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert all(x.is_contiguous() for x in (XQ, WQ, x_scale, w_scale))
    assert not any(x.data_ptr() % 16 for x in (XQ, WQ))
    out = torch.zeros(m, n, dtype=torch.float32, device=XQ.device)
    for block in range(k // _BLOCK):
        of = slice(block * _BLOCK, (block + 1) * _BLOCK)
        scales = x_scale[:, block, None] * w_scale[:, block].repeat_interleave(_BLOCK)[:n]
        out += XQ[:, of].float() @ WQ[:, of].float().t() * scales
    return out.to(dtype)
