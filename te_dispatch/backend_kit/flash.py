# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What implementations on FlashAttention's interface share: FlashAttention itself, and AITER, which has the same.

Its operands are (b, s, h, d), or packed (t, h, d), its windows are pairs with -1 for no bound, and its diagonals end in
the bottom right corner of the score matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.backend_kit.memory import Empty
from te_dispatch.core.errors import Declined
from te_dispatch.ops import alloc
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors

#: Bytes that kernels load at once: where rows start at multiples of them, operands are read where they lie.
ALIGNMENT = 16


class FlashOptions(NamedTuple):
    """The options of a call.

    Attributes:
        causal: the diagonal alone bounds keys. left, right: the window, -1 unbounded.
        cu_seqlens_q, cu_seqlens_kv, longest_q, longest_kv: of packed operands; the lengths None for dense ones.
    """

    scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    longest_q: int
    longest_kv: int
    deterministic: bool

    def sees_nothing(self, rows: int, columns: int) -> bool:
        """Whether the first rows of a score matrix, whose diagonal ends in the bottom right corner, may see no key."""
        return 0 <= self.right < rows - columns


def flash_options(spec: AttentionSpec, tensors: AttentionTensors, name: str) -> FlashOptions:
    """The options of a call as FlashAttention's interface takes them.

    Args:
        name: of the implementation, for messages.

    Raises:
        Declined: a scale that is not positive: kernels find the largest logit before they scale.
    """
    if not spec.scale > 0:
        raise Declined(f"{name} needs a positive softmax_scale, got {spec.softmax_scale}")
    left, right = spec.band
    packed = spec.layout == "thd"
    return FlashOptions(
        spec.scale, right == 0 and left < 0, left, right, float(spec.softcap), tensors.cu_seqlens_q if packed else None,
        tensors.cu_seqlens_kv if packed else None, spec.q_shape[0] if spec.max_seqlen_q is None else spec.max_seqlen_q,
        spec.k_shape[0] if spec.max_seqlen_kv is None else spec.max_seqlen_kv, spec.deterministic,
    )  # fmt: skip


def require_same_diagonal(spec: AttentionSpec, tensors: AttentionTensors, name: str) -> None:
    """Of a forward: its diagonal is the interface's. A backward cannot tell, which may be given other objects.

    Raises:
        Declined: a diagonal that starts in the top left corner of a score matrix that may not be square.
    """
    if spec.bottom_right or spec.band == (-1, -1):
        return
    sequence = 0 if spec.layout == "sbhd" else 1
    if spec.layout != "thd" and spec.q_shape[sequence] == spec.k_shape[sequence]:
        return
    if spec.layout == "thd" and tensors.cu_seqlens_q is tensors.cu_seqlens_kv:
        return
    raise Declined(
        f"{name} ends its diagonal in the bottom right corner; {spec.mask} wants the top left one, and lengths differ"
    )


def batch_first(x: torch.Tensor, layout: str, empty: Empty | None = None) -> torch.Tensor:
    """(b, s, h, d), or (t, h, d): a view, unless x does not lie as kernels load it.

    Args:
        empty: where memory comes from; None for `te_dispatch.ops.alloc.empty`.
    """
    if x.data_ptr() % ALIGNMENT or not rows_aligned(x.shape, x.stride(), x.element_size()):
        x = (empty or alloc.empty)("workspace", tuple(x.shape), x.dtype, x.device).copy_(x)
    return x.transpose(0, 1) if layout == "sbhd" else x


def rows_aligned(shape: tuple[int, ...], stride: tuple[int, ...], element_size: int) -> bool:
    """Whether features lie beside each other, rows start at multiples of `ALIGNMENT` bytes, and nothing is expanded."""
    if shape[-1] > 1 and stride[-1] != 1:
        return False
    return all(n == 1 or (step > 0 and step * element_size % ALIGNMENT == 0) for n, step in zip(shape[:-1], stride))
