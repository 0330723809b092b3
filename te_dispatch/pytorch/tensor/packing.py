# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized operands between forward and backward: as tensors for `save_for_backward`, which hooks can see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized

#: How many tensors `pack` gives for one record.
PARTS = 5

Parts = tuple[Any, Any, Any, Any, Any]
NOTHING: Parts = (None, None, None, None, None)


#: What a record is besides its tensors: encoding, scaling, scale_layout, shape, dtype, device. A plain tuple, which
#: takes a fifth of a named one's time to make.
Header = tuple[str, str, str, tuple[int, ...], torch.dtype, torch.device]


def with_layout(x: Quantized, layout: str) -> Quantized:
    """x with its scales as a GEMM reads them."""
    return x if x.scale_layout == layout else ops.relayout_scales(x, scale_layout=layout)


def pack(x: Quantized, usage: str) -> tuple[Header, Parts]:
    """The copies of x that the backward reads (``row``, ``column`` or ``both``); the others are let go."""
    header = (x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device)
    if usage == "row":
        return header, (x.row_data, x.row_scale_inv, None, None, x.global_scale_inv)
    if usage == "column":
        return header, (None, None, x.col_data, x.col_scale_inv, x.global_scale_inv)
    return header, (x.row_data, x.row_scale_inv, x.col_data, x.col_scale_inv, x.global_scale_inv)


def unpack(header: Header, parts: Sequence[Any]) -> Quantized:
    """The record that `pack` took apart, with the copies it kept."""
    encoding, scaling, layout, shape, dtype, device = header
    row, row_scale, col, col_scale, global_scale = parts
    return Quantized(row, col, row_scale, col_scale, encoding, scaling, layout, shape, dtype, device, global_scale)


def taken(ctx: Any) -> tuple[Any, ...]:
    """The saved tensors of a backward, which from here on live only as long as its own references to them.

    Autograd lets go of them, unless the graph is retained; otherwise all of them would live until the backward ends.
    """
    saved: tuple[Any, ...] = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return saved


def keep(operand: Any, usage: str, wanted: bool = True) -> tuple[Header | None, Parts]:
    """An operand as tensors to save, whether it is quantized or plain; nothing unless it is `wanted`."""
    if not wanted:
        return None, NOTHING
    if isinstance(operand, torch.Tensor):
        return None, (operand, None, None, None, None)
    return pack(operand, usage)


def restored(header: Header | None, parts: Sequence[Any]) -> Any:
    """The operand that `keep` took apart; None where it was not wanted."""
    return parts[0] if header is None else unpack(header, parts)
