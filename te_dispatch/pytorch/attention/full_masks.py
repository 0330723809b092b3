# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Masks and ALiBi biases in full, under Transformer Engine's names, for programs that attend by themselves.

`DotProductAttention` needs none of them: its operators take lengths and windows.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.pytorch.arguments import require_choice, resolve_device
from te_dispatch.pytorch.attention.masks import (
    ATTENTION_TYPES,
    MASK_TYPES,
    UNBOUNDED,
    Extent,
    alibi_slopes_of,
    lengths_to_cu_seqlens,
    outside_window,
    spelled_out_alibi,
    starts_bottom_right,
)

__all__ = ["get_alibi", "get_full_mask", "get_padding_mask", "get_thd_padding_mask"]

Masks = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_type: str = "self",
) -> Masks:
    """The padding masks that cumulative lengths stand for, on their device.

    Args:
        batch_size: b. cu_seqlens_q, cu_seqlens_kv: int32 (b + 1,) or longer, of which the first b + 1 count.
        max_seqlen_q, max_seqlen_kv: lengths s of the masks.
        attention_type: ``self`` or ``cross``; the arguments of keys are needed for the latter.

    Returns:
        bool (b, 1, 1, s), True for padding; for ``cross`` a pair (of queries, of keys).

    Raises:
        ValueError: an argument that is needed is None.
    """
    require_choice("attention_type", attention_type, ATTENTION_TYPES)
    queries = _padding("q", batch_size, cu_seqlens_q, max_seqlen_q)
    if attention_type == "self":
        return queries
    return queries, _padding("kv", batch_size, cu_seqlens_kv, max_seqlen_kv)


def _padding(side: str, batch: int, cu_seqlens: torch.Tensor | None, length: int | None) -> torch.Tensor:
    if cu_seqlens is None or length is None:
        raise ValueError(f"get_padding_mask: cu_seqlens_{side} and max_seqlen_{side} must be given")
    lengths = cu_seqlens[: batch + 1].diff()
    return (torch.arange(length, device=cu_seqlens.device) >= lengths[:, None]).view(batch, 1, 1, length)


def get_thd_padding_mask(num_tokens: int, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor) -> torch.Tensor:
    """bool (num_tokens,): True for rows of packed sequences that belong to none.

    Args:
        cu_seqlens: int32 (b + 1,), cumulative lengths. cu_seqlens_padded: int32 (b + 1,), where sequences start.
    """
    rows = torch.arange(num_tokens, device=cu_seqlens.device)
    # Sequences of no rows share their start with the next; rows belong to the last one that starts there.
    sequence = torch.searchsorted(cu_seqlens_padded[1:].contiguous(), rows, right=True)
    sequence = sequence.clamp(max=cu_seqlens.numel() - 2)
    return rows >= (cu_seqlens_padded[:-1] + cu_seqlens.diff())[sequence]


@torch.no_grad()
def get_full_mask(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str = "no_mask",
    attention_mask: Masks | None = None,
    window_size: tuple[int, int] | None = None,
    attention_type: str = "self",
    bottom_right_alignment: bool = True,
) -> tuple[str, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A mask, a window and a diagonal as one mask.

    Args:
        max_seqlen_q, max_seqlen_kv: sizes s_q and s_kv of the score matrix.
        attn_mask_type: one of `MASK_TYPES`.
        attention_mask: bool, True = masked out: (b, 1, 1, s) for padding masks, for ``cross`` attention a pair (of
            queries, of keys); for others anything that broadcasts to the scores, or None.
        window_size: (left, right) keys that a query may look at around its own position, -1 for no bound, None for no
            window. The right one is 0 under a causal mask.
        bottom_right_alignment: whether positions count from the bottom right corner of a sequence's scores, for masks
            that do not say so in their name.

    Returns:
        (mask type, mask, lengths of queries, lengths of keys): the type is ``arbitrary`` where a window was given; the
        mask is bool (1 or b, 1, s_q, s_kv), True = masked out; lengths are int64 (b,), None without padding.

    Raises:
        ValueError: another mask type, or no mask for padding.
    """
    require_choice("attn_mask_type", attn_mask_type, MASK_TYPES)
    require_choice("attention_type", attention_type, ATTENTION_TYPES)
    windowed = window_size is not None and (window_size[0] != -1 or window_size[1] not in (-1, 0))
    left, right = UNBOUNDED if window_size is None else window_size
    causal = "causal" in attn_mask_type
    given, lengths_q, lengths_kv = attention_mask, None, None
    if "padding" in attn_mask_type:
        if attention_mask is None:
            raise ValueError(f"get_full_mask: attention_mask must be given for attn_mask_type={attn_mask_type!r}")
        q, kv = attention_mask if isinstance(attention_mask, tuple | list) else (attention_mask, attention_mask)
        given = q.transpose(-1, -2) | kv
        lengths_q, lengths_kv = (mask.logical_not().flatten(1).sum(1) for mask in (q, kv))
    assert given is None or isinstance(given, torch.Tensor)
    extent = Extent(
        1 if lengths_q is None else lengths_q.numel(),
        max_seqlen_q,
        max_seqlen_kv,
        None if lengths_q is None else lengths_to_cu_seqlens(lengths_q),
        None if lengths_kv is None else lengths_to_cu_seqlens(lengths_kv),
        resolve_device(None) if given is None else given.device,
    )
    distances = extent.distances(starts_bottom_right(attn_mask_type, bottom_right_alignment))
    masked = outside_window(distances, (left, 0 if causal else right))
    return (
        "arbitrary" if windowed else attn_mask_type,
        masked if given is None else masked | given,
        lengths_q,
        lengths_kv,
    )


@torch.no_grad()
def get_alibi(
    _alibi_cache: dict[str, Any],
    num_heads: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    actual_seqlens_q: torch.Tensor | None = None,
    actual_seqlens_kv: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    bottom_right_alignment: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ALiBi's slopes and bias: -slope |j - i - offset| of query i and key j (Press et al. 2022).

    Args:
        _alibi_cache: where both are kept from one call to the next. They are made anew where its entries
            ``_alibi_slopes_require_update`` and ``_alibi_bias_require_update`` are True or absent; they become False.
        num_heads: h. max_seqlen_q, max_seqlen_kv: sizes s_q and s_kv of the score matrix.
        actual_seqlens_q, actual_seqlens_kv: integers (b,), lengths of the sequences, or both None.
        alibi_slopes: float32 (h,) or (b, h), None for the paper's.
        bias_dtype: None for float32.
        bottom_right_alignment: whether the offset is length of keys - length of queries, else 0.

    Returns:
        Slopes, float32 (h,) or (b, h); bias (1 or b, h, s_q, s_kv).

    Raises:
        ValueError: lengths of one side only, or slopes of other dimensions.
    """
    if (actual_seqlens_q is None) != (actual_seqlens_kv is None):
        raise ValueError("get_alibi: actual_seqlens_q and actual_seqlens_kv must both be given or both be None")
    known = next((x.device for x in (alibi_slopes, actual_seqlens_q) if x is not None), None)
    if _alibi_cache.get("_alibi_slopes_require_update", True):
        slopes = alibi_slopes_of(num_heads, known or resolve_device(None)) if alibi_slopes is None else alibi_slopes
        _alibi_cache.update(_alibi_slopes=slopes, _num_heads=num_heads, _alibi_slopes_require_update=False)
    slopes = _alibi_cache["_alibi_slopes"]
    if slopes.dim() not in (1, 2):
        raise ValueError(f"get_alibi: alibi_slopes must be (heads,) or (batch, heads), got {tuple(slopes.shape)}")
    if _alibi_cache.get("_alibi_bias_require_update", True):
        lengths = (actual_seqlens_q, actual_seqlens_kv)
        cu_q, cu_kv = (None if x is None else lengths_to_cu_seqlens(x) for x in lengths)
        extent = Extent(
            1 if cu_q is None else cu_q.numel() - 1, max_seqlen_q, max_seqlen_kv, cu_q, cu_kv, slopes.device
        )
        bias = spelled_out_alibi(extent, num_heads, slopes, bottom_right_alignment, bias_dtype or torch.float32)
        _alibi_cache.update(
            _alibi_bias=bias, _max_seqlen_q=max_seqlen_q, _max_seqlen_kv=max_seqlen_kv,
            _bottom_right_alignment=bottom_right_alignment, _alibi_bias_require_update=False,
        )  # fmt: skip
    return slopes, _alibi_cache["_alibi_bias"]
