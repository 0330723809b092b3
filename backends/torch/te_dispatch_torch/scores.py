# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Score matrices of attention: masks, biases, cap and softmax, in fp32 tensor operations without host data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch_torch import dropout
from te_dispatch_torch.quantize import cast, values
from te_dispatch_torch.sequences import (
    as_float,
    from_pages,
    from_per_head,
    gather,
    lengths_of,
    per_head,
    scatter,
    token_index,
)

Operand = torch.Tensor | Quantized


class Setting(NamedTuple):
    """One call, brought to (b, h, s, d) and checked.

    Attributes:
        q, k, v: fp32, zero past each sequence's length. index_q, index_kv: thd only (`token_index`).
        hidden: bool, broadcastable to (b, h, s_q, s_kv), True = masked; None for no mask.
        bias: fp32, to be added before (`bias_type` pre_scale) or after the cap. sink: fp32 (h, 1, 1), ln of s.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: str
    index_q: torch.Tensor | None
    index_kv: torch.Tensor | None
    tokens: tuple[int, int]
    hidden: torch.Tensor | None
    bias: torch.Tensor | None
    bias_type: str
    scale: float
    sink: torch.Tensor | None
    softcap: float
    dropout_p: float
    rng_state: torch.Tensor | None

    def queries_of(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor laid out as q (the output's gradient) as (b, h, s_q, d)."""
        if self.index_q is not None:
            return gather(x, self.index_q)
        return per_head(x, self.layout)

    def to_layout(self, x: torch.Tensor, keys: bool = False) -> torch.Tensor:
        """(b, h, s, d) as the caller lays out its queries, or its keys."""
        index = self.index_kv if keys else self.index_q
        if index is not None:
            return scatter(x, index, self.tokens[1 if keys else 0], 0.0)
        return from_per_head(x, self.layout)


class Scores(NamedTuple):
    """z (-Inf where masked), tanh of the cap or None, p, lse (b, h, s_q), fully masked rows, dropout factors."""

    z: torch.Tensor
    capped: torch.Tensor | None
    p: torch.Tensor
    lse: torch.Tensor
    empty: torch.Tensor
    keep: torch.Tensor | None


def through(x: torch.Tensor, quantizer: Quantizer | None) -> torch.Tensor:
    """The values that a cast leaves."""
    return x if quantizer is None else values(cast(x, quantizer, "row", torch.float32), "row")


def setting_of(q: Operand, k: Operand, v: Operand, spec: AttentionSpec, tensors: AttentionTensors) -> Setting:
    """Bring a call's checked arguments to one form."""
    layout, page_table = spec.layout, tensors.page_table
    len_q = _lengths("cu_seqlens_q", tensors.cu_seqlens_q, spec.ragged)
    len_kv = _lengths("cu_seqlens_kv", tensors.cu_seqlens_kv, spec.ragged and page_table is None)
    if page_table is not None:
        len_kv = None if tensors.cu_seqlens_kv is None else lengths_of(tensors.cu_seqlens_kv)
    index_q, qh = _heads_first(q, layout, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded, spec.max_seqlen_q, len_q)
    index_kv = None
    if page_table is not None:
        kh, vh = from_pages(as_float(k), page_table), from_pages(as_float(v), page_table)
    else:
        index_kv, kh = _heads_first(
            k, layout, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded, spec.max_seqlen_kv, len_kv
        )
        vh = gather(as_float(v), index_kv) if index_kv is not None else per_head(as_float(v), layout)
    # Whatever lies past a sequence's end, NaN too, must not reach a sum: 0 * NaN is NaN.
    if len_q is not None and index_q is None:
        qh = torch.where(_before(qh.shape[2], len_q), qh, 0.0)
    if len_kv is not None and index_kv is None:
        inside = _before(kh.shape[2], len_kv)
        kh, vh = torch.where(inside, kh, 0.0), torch.where(inside, vh, 0.0)
    offset = _offset(spec, qh.shape[2], kh.shape[2], len_q, len_kv)
    hidden = _hidden(spec, tensors.attn_mask, qh, kh, len_q, len_kv, offset)
    bias = _alibi(tensors.alibi_slopes, qh, kh, offset) if spec.bias_type == "alibi" else tensors.bias
    sink = None
    if spec.softmax_type != "vanilla":
        given = tensors.softmax_offset
        zeros = torch.zeros((qh.shape[1],), dtype=torch.float32, device=qh.device)
        sink = (zeros if given is None else given.float()).view(-1, 1, 1)
    return Setting(
        qh, kh, vh, layout, index_q, index_kv, (q.shape[0], k.shape[0]), hidden,
        None if bias is None else bias.float(), spec.bias_type, spec.scale, sink, spec.softcap, spec.dropout_p,
        tensors.rng_state,
    )  # fmt: skip


def _lengths(name: str, cu_seqlens: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
    if not needed:
        return None
    if cu_seqlens is None:
        raise ValueError(f"{name} is required for thd and padding masks, got None")
    return lengths_of(cu_seqlens)


def _heads_first(
    x: Operand,
    layout: str,
    cu_seqlens: torch.Tensor | None,
    padded: torch.Tensor | None,
    longest: int | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if layout != "thd" or cu_seqlens is None or lengths is None:
        return None, per_head(as_float(x), layout)
    if longest is None:
        longest = int(lengths.max()) if lengths.numel() else 0
    index = token_index(cu_seqlens, padded, longest, x.shape[0])
    return index, gather(as_float(x), index)


def _before(size: int, lengths: torch.Tensor) -> torch.Tensor:
    """(b, 1, size, 1): True before each sequence's end."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, :, None]


def _offset(
    spec: AttentionSpec, sq: int, skv: int, len_q: torch.Tensor | None, len_kv: torch.Tensor | None
) -> torch.Tensor | int:
    """Of the diagonal: 0, or len_kv - len_q, as (b, 1, 1, 1) where lengths differ by sequence."""
    if not spec.bottom_right:
        return 0
    if len_q is None and len_kv is None:
        return skv - sq
    difference = (skv if len_kv is None else len_kv) - (sq if len_q is None else len_q)
    return difference.view(-1, 1, 1, 1)


def _hidden(
    spec: AttentionSpec,
    attn_mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    len_q: torch.Tensor | None,
    len_kv: torch.Tensor | None,
    offset: torch.Tensor | int,
) -> torch.Tensor | None:
    left, right = spec.band
    i = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    j = torch.arange(k.shape[2], device=q.device).view(1, 1, 1, -1)
    parts = [] if attn_mask is None else [attn_mask]
    if right >= 0:
        parts.append(j > i + offset + right)
    if left >= 0:
        parts.append(j < i + offset - left)
    if len_q is not None:
        parts.append(i >= len_q.view(-1, 1, 1, 1))
    if len_kv is not None:
        parts.append(j >= len_kv.view(-1, 1, 1, 1))
    hidden = None
    for part in parts:
        hidden = part if hidden is None else hidden | part
    return hidden


def _alibi(slopes: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, offset: torch.Tensor | int) -> torch.Tensor:
    """slope_h (j - i - offset). Without slopes Press et al.'s: 2^(-8 n / h), interleaved where h is no power of two."""
    heads = q.shape[1]
    if slopes is None:
        power = 1 << max(heads.bit_length() - 1, 0)
        # Made on the device, where a copied list would synchronize; the exponents are exact.
        steps = torch.arange(1, power + 1, dtype=torch.float32, device=q.device) * (8.0 / power)
        between = torch.arange(1, 2 * power, 2, dtype=torch.float32, device=q.device) * (4.0 / power)
        slopes = torch.exp2(-torch.cat((steps, between))[:heads])
    i = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    j = torch.arange(k.shape[2], device=q.device).view(1, 1, 1, -1)
    return slopes.float().view(-1, heads, 1, 1) * (j - i - offset)


def scores_of(s: Setting) -> Scores:
    """The operator's formulas in its order."""
    q = s.q * s.scale  # s_q x d products instead of s_q x s_kv
    if s.q.shape[1] == s.k.shape[1]:
        z = q @ s.k.transpose(-1, -2)
    else:
        z = (q.unflatten(1, (s.k.shape[1], -1)) @ s.k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if s.bias is not None and s.bias_type == "pre_scale":
        z = z + s.bias * s.scale
    capped = None
    if s.softcap > 0.0:
        capped = torch.tanh(z / s.softcap)
        z = capped * s.softcap
    if s.bias is not None and s.bias_type != "pre_scale":
        z = z + s.bias
    if s.hidden is not None:
        z = z.masked_fill(s.hidden, float("-inf"))
    top = z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((*z.shape[:-1], 1), float("-inf"))
    empty = top == float("-inf")
    shift = torch.where(empty, 0.0, top if s.sink is None else torch.maximum(top, s.sink))
    weights = torch.exp(z - shift)
    total = weights.sum(-1, keepdim=True)
    if s.sink is not None:
        total = total + torch.exp(s.sink - shift)
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), shift + torch.log(total)).squeeze(-1)
    keep = None
    if s.rng_state is not None and s.dropout_p > 0.0:
        kept = dropout.keep_mask(tuple(z.shape), s.dropout_p, s.rng_state)
        keep = kept.to(torch.float32) * (1.0 / (1.0 - s.dropout_p))
    return Scores(z, capped, weights / total, lse, empty, keep)
