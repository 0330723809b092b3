# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""From the masks, windows and biases of the module interface to those of the attention operators.

The operators know a window and a diagonal for each mask; the module interface can combine them more freely
(`bottom_right_diagonal` with any mask) and counts ALiBi distances both ways. Where a combination has no operator of
its own it is spelled out as an explicit mask or bias, which costs memory but stays right.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch

from te_dispatch.pytorch.arguments import require_choice

#: ``attention_type``.
ATTENTION_TYPES = ("self", "cross")

#: Spellings of `attn_mask_type`; a comma may stand for the underscore, and causal may precede padding.
MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
_SPELLINGS = {"causal_padding": "padding_causal", "causal_bottom_right_padding": "padding_causal_bottom_right"}
UNBOUNDED = (-1, -1)


class Masking(NamedTuple):
    """Which keys a query may look at.

    Attributes:
        mask_type: one of `MASK_TYPES`.
        window: (left, right), -1 for unbounded.
        bottom_right: see `starts_bottom_right`.
    """

    mask_type: str
    window: tuple[int, int]
    bottom_right: bool


def canonical_mask_type(name: str, value: str) -> str:
    """`value` as one of `MASK_TYPES`; `name` is the argument, for the error."""
    spelled = value.replace(",", "_") if isinstance(value, str) else value
    spelled = _SPELLINGS.get(spelled, spelled)
    if spelled not in MASK_TYPES:
        require_choice(name, value, MASK_TYPES)
    return spelled


def canonical_window(mask_type: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) with -1 for unbounded.

    Causal masks imply right = 0. For the others (-1, 0) means no window, as in Transformer Engine, where it is what a
    causal module's default turns into; a warning says so.
    """
    causal = "causal" in mask_type
    if window is None:
        return (-1, 0) if causal else UNBOUNDED
    left, right = int(window[0]), int(window[1])
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be a pair of integers >= -1, got {tuple(window)}")
    if causal:
        return (left, 0)
    if (left, right) == (-1, 0):
        warnings.warn(f"window_size=(-1, 0) means no window with attn_mask_type={mask_type!r}", stacklevel=3)
        return UNBOUNDED
    return (left, right)


def starts_bottom_right(mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Whether diagonals end in the bottom right corner of the score matrix: ``j <= i + len_kv - len_q``.

    Causal masks say so in their name, whatever the argument; for the others it defaults to True.
    """
    if "causal" in mask_type:
        return mask_type.endswith("bottom_right")
    return True if bottom_right_diagonal is None else bottom_right_diagonal


def lengths_to_cu_seqlens(lengths: torch.Tensor) -> torch.Tensor:
    """int (b,) -> int32 (b + 1,): cumulative sums from 0."""
    sums = torch.cumsum(lengths, 0, dtype=torch.int32)
    return torch.nn.functional.pad(sums, (1, 0))


def mask_to_cu_seqlens(name: str, mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The cumulative lengths that a padding mask stands for.

    Args:
        name: the argument, for errors.
        mask: bool (b, 1, 1, s), True where a token is padding; padding follows the tokens of every sequence.
        batch, length: b and s.

    Returns:
        int32 (b + 1,).
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be a bool tensor (True = masked out), got {mask.dtype}")
    if mask.numel() != batch * length or mask.shape[0] != batch or mask.shape[-1] != length:
        raise ValueError(
            f"{name} for a padding mask must have shape ({batch}, 1, 1, {length}), got {tuple(mask.shape)}"
        )
    return lengths_to_cu_seqlens(mask.reshape(batch, length).logical_not().sum(-1, dtype=torch.int32))


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """The cumulative lengths that a padding mask stands for, under Transformer Engine's name.

    Args:
        mask: bool (b, 1, 1, s), True where a token is padding.

    Returns:
        int32 (b + 1,), on the mask's device.

    Raises:
        ValueError: another dtype or shape.
    """
    if mask.dim() != 4:
        raise ValueError(f"mask must have shape (b, 1, 1, s), got {tuple(mask.shape)}")
    return mask_to_cu_seqlens("mask", mask, mask.shape[0], mask.shape[-1])


class Extent(NamedTuple):
    """The score matrix of a dense call.

    Attributes:
        batch, seqlen_q, seqlen_kv: its sizes.
        cu_seqlens_q, cu_seqlens_kv: int32 (b + 1,) for padding masks, else None.
        device: of the tensors.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_kv: torch.Tensor | None
    device: torch.device

    def offsets(self) -> torch.Tensor:
        """len_kv - len_q as an integer tensor (1 or b, 1, 1, 1)."""
        if self.cu_seqlens_q is None or self.cu_seqlens_kv is None:
            return torch.full((1, 1, 1, 1), self.seqlen_kv - self.seqlen_q, device=self.device)
        return (self.cu_seqlens_kv.diff() - self.cu_seqlens_q.diff()).view(-1, 1, 1, 1)

    def aligned(self) -> bool:
        """Whether both corners' diagonals are known to coincide without reading the device."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q is self.cu_seqlens_kv
        return self.seqlen_q == self.seqlen_kv

    def distances(self, bottom_right: bool) -> torch.Tensor:
        """j - i - offset, integers (1 or b, 1, s_q, s_kv)."""
        i = torch.arange(self.seqlen_q, device=self.device).view(1, 1, -1, 1)
        j = torch.arange(self.seqlen_kv, device=self.device).view(1, 1, 1, -1)
        return j - i - self.offsets() if bottom_right else j - i

    def padding(self) -> torch.Tensor | None:
        """bool (b, 1, s_q, s_kv), True beyond a sequence's tokens; None without lengths."""
        if self.cu_seqlens_q is None or self.cu_seqlens_kv is None:
            return None
        i = torch.arange(self.seqlen_q, device=self.device).view(1, 1, -1, 1)
        j = torch.arange(self.seqlen_kv, device=self.device).view(1, 1, 1, -1)
        return (i >= self.cu_seqlens_q.diff().view(-1, 1, 1, 1)) | (j >= self.cu_seqlens_kv.diff().view(-1, 1, 1, 1))


def outside_window(distances: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
    """bool, of the shape of `distances` (`Extent.distances`): True for keys outside of the window."""
    masked = torch.zeros_like(distances, dtype=torch.bool)
    if window[0] >= 0:
        masked = masked | (distances < -window[0])
    if window[1] >= 0:
        masked = masked | (distances > window[1])
    return masked


def spelled_out_window(
    extent: Extent, window: tuple[int, int], bottom_right: bool, attn_mask: torch.Tensor | None
) -> torch.Tensor:
    """bool (1 or b, 1 or h, s_q, s_kv), True = masked: the window, the padding and `attn_mask` together."""
    masked = outside_window(extent.distances(bottom_right), window)
    for other in (extent.padding(), attn_mask):
        if other is not None:
            masked = masked | other
    return masked


def alibi_slopes_of(heads: int, device: torch.device) -> torch.Tensor:
    """float32 (h,): the slopes of Press et al. 2022.

    With n the largest power of two up to h: 2^(-8 k / n) for k = 1..n, then every second one of the series for 2n.
    """
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * k / n) for k in range(1, n + 1)]
    slopes += [2.0 ** (-4.0 * k / n) for k in range(1, 2 * (heads - n), 2)]
    assert len(slopes) == heads and all(math.isfinite(s) for s in slopes)
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def spelled_out_alibi(
    extent: Extent, heads: int, slopes: torch.Tensor | None, bottom_right: bool, dtype: torch.dtype
) -> torch.Tensor:
    """ALiBi for masks that let a query see later keys: -slope |j - i - offset|, (1 or b, h, s_q, s_kv) in `dtype`."""
    if slopes is None:
        slopes = alibi_slopes_of(heads, extent.device)
    slopes = slopes.view(1, heads, 1, 1) if slopes.dim() == 1 else slopes.view(slopes.shape[0], heads, 1, 1)
    return (extent.distances(bottom_right).abs() * -slopes.float()).to(dtype)


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Write -10000 where the mask is True, in place, and return the scores.

    Args:
        attention_scores: floating point. attention_mask: bool, broadcast to the scores.
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)
