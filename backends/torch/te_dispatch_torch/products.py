# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products of PyTorch, kept from operands that its CPU library gets wrong."""

from __future__ import annotations

import torch

#: Whether PyTorch multiplies 16-bit matrices of the CPU on AMX units. oneDNN 3.12 (PyTorch 2.13) reads past a row's end
#: there if rows have gaps or the contracted size is no multiple of a tile's 32 elements: what lies behind the row, the
#: next row too, is multiplied by 0, and so a NaN or Inf there reaches the result.
AMX_UNITS: bool = torch.cpu._is_amx_tile_supported()

_TILE = 32


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (m, k) times b (k, n), plus bias (n,), in their dtype."""
    a, b = readable(a, b)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def readable(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a (m, k) and b (k, n) as the device's library reads them right: themselves, or copies without gaps, with zeros up
    to the next multiple of 32 along k.
    """
    if not AMX_UNITS or a.device.type != "cpu" or a.dtype not in (torch.bfloat16, torch.float16):
        return a, b
    k = a.shape[1]
    padded = -(-k // _TILE) * _TILE
    return _dense(a, (a.shape[0], padded)), _dense(b, (padded, b.shape[1]))


def _dense(x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if tuple(x.shape) == shape:
        return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()
    padded = x.new_zeros(shape)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded
