# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's operands as (batch, heads, sequence, features), whatever their layout, and results back again."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.attention import PACKINGS
from te_dispatch_torch.quantize import dequantize

Operand = torch.Tensor | Quantized


def per_head(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(b, h, s, d) view of a dense operand; also its inverse's argument order for `from_per_head`."""
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.permute(0, 2, 1, 3)


def from_per_head(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(b, h, s, d) back to a dense layout, contiguous."""
    return (x.permute(2, 0, 1, 3) if layout == "sbhd" else x.permute(0, 2, 1, 3)).contiguous()


def as_float(x: Operand) -> torch.Tensor:
    """fp32 values of a tensor or record."""
    return dequantize(x, dtype=torch.float32) if isinstance(x, Quantized) else x.float()


def lengths_of(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(b,) lengths from cumulative ones."""
    return (cu_seqlens[1:] - cu_seqlens[:-1]).long()


def token_index(cu_seqlens: torch.Tensor, padded: torch.Tensor | None, longest: int, tokens: int) -> torch.Tensor:
    """(b, longest): the row of a thd tensor that holds each position; one past the end where there is none."""
    starts = (cu_seqlens if padded is None else padded)[:-1].long()
    position = torch.arange(longest, device=cu_seqlens.device)
    return torch.where(position < lengths_of(cu_seqlens)[:, None], starts[:, None] + position, tokens)


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """thd (t, h, d) to (b, h, longest, d), zeros where `index` is one past the end."""
    extended = torch.cat((x, x.new_zeros((1, *x.shape[1:]))))
    return extended[index].permute(0, 2, 1, 3)


def scatter(x: torch.Tensor, index: torch.Tensor, tokens: int, fill: float) -> torch.Tensor:
    """(b, h, longest, ...) to (t, h, ...), `fill` in rows that belong to no sequence."""
    rows = x.transpose(1, 2).flatten(0, 1)
    target = x.new_full((tokens + 1, *rows.shape[1:]), fill)
    return target.index_copy(0, index.flatten(), rows)[:tokens].contiguous()


def from_pages(x: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """(pages, page_size, g, d) blocks to (b, g, pages * page_size, d)."""
    return x[page_table.long()].flatten(1, 2).permute(0, 2, 1, 3)


def pack(grads: list[torch.Tensor], packing: str | None) -> list[torch.Tensor]:
    """dq, dk, dv as views of one tensor, as `packing` promises."""
    if packing is None:
        return grads
    if packing not in PACKINGS:
        raise ValueError(f"packing must be None or one of {', '.join(PACKINGS)}, got {packing!r}")
    first = 0 if "3" in packing else 1
    axis = -3 if packing.endswith("hd") else -2
    return grads[:first] + list(torch.stack(grads[first:], axis).unbind(axis))
