# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products of PyTorch, kept from operands that its libraries get wrong."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.products import amx_tiles

#: Whether PyTorch multiplies 16-bit matrices of the CPU on AMX units. oneDNN 3.12 (PyTorch 2.13) reads past a row's end
#: there if rows have gaps or the contracted size is no multiple of a tile's 32 elements: what lies behind the row, the
#: next row too, is multiplied by 0, and so a NaN or Inf there reaches the result.
AMX_UNITS: bool = amx_tiles()

_TILE = 32
_VECTOR = 8


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (m, k) times b (k, n), plus bias (n,), in their dtype: summed in fp32 and rounded once."""
    a, b = readable(a, b)
    if bias is None:
        return torch.mm(a, b)
    if a.device.type == "cuda" and a.dtype != torch.float32 and not _aligned(a, b, bias):
        return torch.mm(a, b, out_dtype=torch.float32).add_(bias).to(a.dtype)
    return torch.addmm(bias, a, b)


def _aligned(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether every row of 16-bit operands and of the result begins at a multiple of 16 bytes, and the bias has no
    gaps. Where that is not so, torch.addmm of GPUs rounds the product to 16 bits before it adds the bias (measured:
    PyTorch 2.11, CUDA 13.0, H100 and H200).
    """
    if bias.stride(0) != 1 or any(1 not in x.stride() for x in (a, b)):
        return False
    rows = [x.stride(0) if x.stride(1) == 1 else x.stride(1) for x in (a, b)]
    places = [x.storage_offset() for x in (a, b, bias)]
    return all(n % _VECTOR == 0 for n in (*rows, b.shape[1], *places))


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
