# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where attention's sequences lie: every layout as a list of (tokens, heads, features) arrays, one per sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from te_dispatch.ops.attention_spec import AttentionSpec
from te_dispatch_reference import host
from te_dispatch_reference.host import F64, Array

#: What selects one sequence's tokens from an operand: slices and integers.
Index = Any


class Side(NamedTuple):
    """The query side, or the key and value side.

    Attributes:
        tokens: per sequence, what selects its tokens, (tokens, heads, features), from the operand.
        length: per sequence, how many of those tokens are valid (the first ones).
        extent: S of the score matrix: the dense length, or max_seqlen for thd.
    """

    tokens: list[Index]
    length: list[int]
    extent: int


def _bounds(name: str, cu_seqlens: torch.Tensor | None, batch: int | None) -> NDArray[np.int64]:
    if cu_seqlens is None:
        raise ValueError(f"{name}: not given, expected int32 (b + 1,) for this layout and mask")
    bounds = host.array(cu_seqlens).astype(np.int64)
    if bounds.ndim != 1 or bounds.size < 1 or (batch is not None and bounds.size != batch + 1):
        expected = "(b + 1,)" if batch is None else f"({batch + 1},)"
        raise ValueError(f"{name}: got shape {tuple(cu_seqlens.shape)}, expected {expected}")
    if bounds[0] != 0 or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{name}: got {bounds.tolist()}, expected to rise from 0")
    return bounds


def packed_side(
    which: str,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    padded: torch.Tensor | None,
    max_seqlen: int | None,
) -> Side:
    """Of layout thd; `which` is q or kv. `padded` gives the starts in memory where those differ."""
    bounds = _bounds(f"cu_seqlens_{which}", cu_seqlens, None)
    starts = bounds
    if padded is not None:
        starts = _bounds(f"cu_seqlens_{which}_padded", padded, len(bounds) - 1)
    length = np.diff(bounds)
    if np.any(starts[:-1] + length > x.shape[0]):
        raise ValueError(f"cu_seqlens_{which}: got sequences that end past the {x.shape[0]} tokens")
    longest = int(length.max(initial=0))
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"max_seqlen_{which}: got {max_seqlen}, expected at least the longest sequence, {longest}")
    tokens: list[Index] = [(slice(int(s), int(s + n)),) for s, n in zip(starts[:-1], length, strict=True)]
    return Side(tokens, [int(n) for n in length], longest if max_seqlen is None else max_seqlen)


def dense_side(which: str, x: torch.Tensor, layout: str, masked: bool, cu_seqlens: torch.Tensor | None) -> Side:
    """Of layouts sbhd and bshd; with a padding mask (`masked`) cu_seqlens gives the valid lengths."""
    axis = 1 if layout == "sbhd" else 0
    batch, extent = x.shape[axis], x.shape[1 - axis]
    length = [extent] * batch
    if masked:
        length = [int(n) for n in np.diff(_bounds(f"cu_seqlens_{which}", cu_seqlens, batch))]
        if max(length, default=0) > extent:
            raise ValueError(f"cu_seqlens_{which}: got lengths up to {max(length)}, expected at most {extent}")
    return Side([(slice(None), b) if axis == 1 else (b,) for b in range(batch)], length, extent)


def from_pages(x: F64, page_table: Array, length: list[int]) -> list[F64]:
    """Sequences out of (pages, page_size, g, d) blocks, cut to their lengths."""
    return [x[row].reshape(-1, *x.shape[2:])[:n] for row, n in zip(page_table, length, strict=True)]


def paged_side(x: torch.Tensor, page_table: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Side:
    """Of paged keys and values; without cu_seqlens_kv every sequence fills its pages."""
    if x.ndim != 4:
        raise ValueError(f"k: got shape {tuple(x.shape)} with page_table, expected (pages, page_size, g, d)")
    pages = host.array(page_table)
    if pages.ndim != 2 or (pages.size and (pages.min() < 0 or pages.max() >= x.shape[0])):
        raise ValueError(
            f"page_table: got shape {tuple(page_table.shape)}, expected (b, pages) of 0 to {x.shape[0] - 1}"
        )
    extent = pages.shape[1] * x.shape[1]
    length = [extent] * pages.shape[0]
    if cu_seqlens is not None:
        length = [int(n) for n in np.diff(_bounds("cu_seqlens_kv", cu_seqlens, pages.shape[0]))]
        if max(length, default=0) > extent:
            raise ValueError(
                f"cu_seqlens_kv: got lengths up to {max(length)}, expected at most {extent}, the pages' size"
            )
    return Side([], length, extent)


def hidden_mask(spec: AttentionSpec, rows: int, columns: int, len_q: int, len_kv: int) -> tuple[NDArray[np.bool_], int]:
    """What one sequence's mask and window hide, (rows, columns), and the diagonal's offset."""
    offset = len_kv - len_q if spec.bottom_right else 0
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    hidden = (i >= len_q) | (j >= len_kv)
    left, right = spec.band
    if left >= 0:
        hidden = hidden | (j < i + offset - left)
    if right >= 0:
        hidden = hidden | (j > i + offset + right)
    return hidden, offset
