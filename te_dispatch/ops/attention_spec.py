# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the attention operators' arguments come to: one `AttentionSpec`, which can be hashed, and the tensors beside q,
k and v. The argument check `te_dispatch.ops.checks.attention.attention` returns the spec of a call that it accepts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Sizes = tuple[int, ...]


class AttentionTensors(NamedTuple):
    """The optional tensors of a call, under the operators' names; `page_table` is None in a backward."""

    attn_mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    softmax_offset: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


class AttentionSpec(NamedTuple):
    """Options and metadata of a call of `attention_fwd` or `attention_bwd`, and nothing of what tensors contain: the
    key of whatever an implementation prepares for such calls. A forward and its backward have equal ones (but for a
    page table). Fields that are not described are the operators' arguments.

    Attributes:
        device, dtype: of q, the nominal dtype where it is quantized.
        q_shape, k_shape, v_shape, q_stride, k_stride, v_stride: as `layout` has them, strides in elements. Of a
            quantized operand the strides are those of its row-wise copy, () without one.
        band: (left, right), the window in force: row i sees key j in [i + offset - left, i + offset + right], -1 for no
            bound. A causal mask means right = 0.
        batch: number of sequences.
        page_table, bias, attn_mask: shapes, None without the tensor. attn_mask_stride: () without one.
        kv_lengths: whether paged keys have lengths, `cu_seqlens_kv`.
        bias_dtype: None without a bias.
        alibi_slopes: number of dimensions, 0 where they are not given.
    """

    device: torch.device
    dtype: torch.dtype
    layout: str
    packing: str | None
    q_shape: Sizes
    q_stride: Sizes
    k_shape: Sizes
    k_stride: Sizes
    v_shape: Sizes
    v_stride: Sizes
    mask: str
    band: tuple[int, int]
    batch: int
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    page_table: Sizes | None
    kv_lengths: bool
    bias: Sizes | None
    bias_dtype: torch.dtype | None
    bias_type: str
    attn_mask: Sizes | None
    attn_mask_stride: Sizes
    alibi_slopes: int
    softmax_scale: float | None
    softmax_type: str
    softcap: float
    dropout_p: float
    deterministic: bool

    @property
    def scale(self) -> float:
        """The factor of q k^T: `softmax_scale`, by default 1/sqrt(d)."""
        return self.q_shape[-1] ** -0.5 if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def bottom_right(self) -> bool:
        """Whether the diagonal ends in the bottom right corner: offset is len_kv - len_q, not 0."""
        return self.mask.endswith("bottom_right")

    @property
    def ragged(self) -> bool:
        """Whether queries and keys of a sequence end where `cu_seqlens` says (those of paged keys may anyway)."""
        return self.layout == "thd" or self.mask.startswith("padding")

    @property
    def out_shape(self) -> Sizes:
        return (*self.q_shape[:-1], self.v_shape[-1])

    @property
    def lse_shape(self) -> Sizes:
        """(b, h, s_q), or (t, h) for thd."""
        if self.layout == "thd":
            return self.q_shape[:-1]
        batch, length = (1, 0) if self.layout == "sbhd" else (0, 1)
        return self.q_shape[batch], self.q_shape[2], self.q_shape[length]

    def of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionSpec:
        """The spec of the same call with other operands, such as contiguous copies."""
        return self._replace(
            q_shape=tuple(q.shape), q_stride=q.stride(), k_shape=tuple(k.shape), k_stride=k.stride(),
            v_shape=tuple(v.shape), v_stride=v.stride(),
        )  # fmt: skip
