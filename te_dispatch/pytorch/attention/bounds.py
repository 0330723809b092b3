# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where the sequences of an attention call begin and end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.pytorch.attention.inputs import Operands
from te_dispatch.pytorch.attention.lowering import AttentionMask
from te_dispatch.pytorch.attention.masks import mask_to_cu_seqlens


class Bounds(NamedTuple):
    """The bounds of a call's sequences, as `DotProductAttention.forward` names and describes them."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    cu_seqlens_q_padded: torch.Tensor | None
    cu_seqlens_kv_padded: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    def padded_between(self, padded: bool, layout: str) -> Bounds:
        """With `pad_between_seqs` applied: False leaves the padded bounds out; for thd, bounds that are not given are
        those without padding."""
        if not padded:
            return self._replace(cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
        if layout != "thd" or (self.cu_seqlens_q_padded is None and self.cu_seqlens_kv_padded is None):
            return self
        q, kv = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        return self._replace(
            cu_seqlens_q_padded=self.cu_seqlens_q if q is None else q,
            cu_seqlens_kv_padded=self.cu_seqlens_kv if kv is None else kv,
        )


def sequence_bounds(
    operands: Operands,
    layout: str,
    mask_type: str,
    attention_mask: AttentionMask | None,
    given: Bounds,
    self_attention: bool,
) -> Bounds:
    """The bounds in force: without cumulative lengths for masks that read none, else those given or the mask's.

    Args:
        operands, layout, mask_type: of the call.
        attention_mask: as `DotProductAttention.forward` takes it; read where lengths are not given.
        given: what the call says; `pad_between_seqs` is applied to it.
        self_attention: keys have the queries' lengths unless they are given their own.

    Raises:
        ValueError: lengths of another dtype, shape or device, or neither lengths nor a mask.
    """
    cu_q, cu_kv = given.cu_seqlens_q, given.cu_seqlens_kv
    if not mask_type.startswith("padding"):
        if cu_q is None and cu_kv is None:
            return given
        return given._replace(cu_seqlens_q=None, cu_seqlens_kv=None)
    if cu_kv is None and self_attention:
        cu_kv = cu_q
    if cu_q is not None and cu_kv is not None:
        _check_lengths("cu_seqlens_q", cu_q, operands.q.device)
        _check_lengths("cu_seqlens_kv", cu_kv, operands.q.device)
    elif layout == "thd":
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_kv"
        raise ValueError(f"{missing} must be int32 (b + 1,) for qkv_format='thd', got None")
    elif attention_mask is None:
        raise ValueError(
            f"attn_mask_type={mask_type!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv; got None"
        )
    else:
        cu_q, cu_kv = _lengths_of_mask(operands, layout, attention_mask)
    return given._replace(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)


def _check_lengths(name: str, cu: torch.Tensor, device: torch.device) -> None:
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.device != device:
        raise ValueError(f"{name} must be int32 (b + 1,) on {device}, got {cu.dtype} {tuple(cu.shape)} on {cu.device}")


def _lengths_of_mask(operands: Operands, layout: str, mask: AttentionMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative lengths (of queries, of keys) of padding masks; one mask for both gives one tensor for both."""
    batch, length = layout.index("b"), layout.index("s")
    b, s_q, s_kv = operands.q_shape[batch], operands.q_shape[length], operands.k_shape[length]
    if isinstance(mask, torch.Tensor):
        if s_q != s_kv:
            raise ValueError(
                "attention_mask must be a pair of masks (of queries, of keys) where their lengths differ "
                f"({s_q} and {s_kv}), got one tensor"
            )
        cu = mask_to_cu_seqlens("attention_mask", mask, b, s_q)
        return cu, cu
    return (
        mask_to_cu_seqlens("attention_mask[0]", mask[0], b, s_q),
        mask_to_cu_seqlens("attention_mask[1]", mask[1], b, s_kv),
    )
