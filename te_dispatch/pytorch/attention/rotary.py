# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding (Su et al., "RoFormer", 2021): the angles, and their application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.ops.attention import LAYOUTS
from te_dispatch.pytorch.arguments import reject_unsupported, require_choice, require_tensor, resolve_device
from te_dispatch.pytorch.assignment import Check, CheckedAttributes, fixed
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope, outside_autocast
from te_dispatch.pytorch.compile import returned
from te_dispatch.pytorch.tensor.quantized_tensor import plain


class RotaryPositionEmbedding(CheckedAttributes):
    """Angles t = position * base^(-2 i / dim) for feature pairs i = 0 .. dim / 2 - 1.

    Args:
        dim: head dimension.
        rotary_percent: the part of it that is rotated.
        seq_len_interpolation_factor, pretrained_max_position_embeddings: given together, positions are interpolated
            (Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023):
            divided by the factor, or, for sequences longer than both multiplied, by max_seq_len / pretrained.
        rotary_base: base.
        interleaved: feature pairs are neighbours (0, 1), (2, 3), ..; else the halves (0, dim / 2), ..

    Raises:
        ValueError: an odd or empty rotated dimension, or one of the interpolation arguments alone.
    """

    inv_freq: torch.Tensor

    _checks: ClassVar[Mapping[str, Check]] = {"dim": fixed("dim", "inv_freq was made")}

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if not 0.0 < rotary_percent <= 1.0:
            raise ValueError(f"rotary_percent must be greater than 0 and at most 1, got {rotary_percent}")
        rotated = int(dim * rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(f"dim * rotary_percent must be a positive even number, got {dim} * {rotary_percent}")
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            raise ValueError(
                "seq_len_interpolation_factor and pretrained_max_position_embeddings must be given together, "
                f"got {seq_len_interpolation_factor} and {pretrained_max_position_embeddings}"
            )
        self.dim = rotated
        self._rotary_base = float(rotary_base)
        self.interleaved = interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.register_buffer("inv_freq", self._frequencies(resolve_device(None)))

    @property
    def rotary_base(self) -> float:
        """What is assigned makes `inv_freq` anew."""
        return self._rotary_base

    @rotary_base.setter
    def rotary_base(self, value: float) -> None:
        self._rotary_base = float(value)
        self.inv_freq = self._frequencies(self.inv_freq.device).to(self.inv_freq.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        return 1.0 / self.rotary_base**exponents

    @torch.no_grad()
    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """float32 (max_seq_len, 1, 1, dim): angles of positions offset, offset + 1, .. in every feature.

        Every angle stands twice, once for each feature of its pair.
        """
        frequencies = self.inv_freq
        if frequencies.dtype != torch.float32:
            # module.bfloat16() has rounded the buffer: three digits are not enough for positions.
            frequencies = self._frequencies(frequencies.device)
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device) + offset
        if self.seq_len_interpolation_factor is not None and self.pretrained_max_position_embeddings is not None:
            factor = float(self.seq_len_interpolation_factor)
            if max_seq_len > self.pretrained_max_position_embeddings * factor:
                factor = max_seq_len / self.pretrained_max_position_embeddings
            positions = positions / factor
        angles = positions[:, None] * frequencies[None, :]
        both = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return both.view(max_seq_len, 1, 1, self.dim)


class RopeOptions(NamedTuple):
    """What a rotation needs besides tensors."""

    layout: str
    interleaved: bool


class _RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        freqs: torch.Tensor,
        options: RopeOptions,
        cu_seqlens: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(freqs, cu_seqlens, offsets)
        ctx.options = options
        ctx.scope = scopes.capture()
        out = ops.rope_fwd(
            x,
            freqs,
            layout=options.layout,
            interleaved=options.interleaved,
            cu_seqlens=cu_seqlens,
            offsets=offsets,
        )
        # An implementation may keep x's strides; callers view the result whatever runs.
        return returned(out.contiguous())

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        freqs, cu_seqlens, offsets = ctx.saved_tensors
        layout, interleaved = ctx.options
        dx = ops.rope_bwd(
            dy.contiguous(), freqs, layout=layout, interleaved=interleaved, cu_seqlens=cu_seqlens, offsets=offsets
        )
        return dx, None, None, None, None


_run_rope = applied(_RopeFunction)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the features of t by its positions' angles; has a gradient for t.

    Args:
        t: (s, b, h, d), (b, s, h, d) or (t, h, d), as `tensor_format` says.
        freqs: (s_max, 1, 1, r) angles as `RotaryPositionEmbedding` gives them; the first r <= d features rotate.
        tensor_format: ``sbhd``, ``bshd`` or ``thd``.
        start_positions: int32 (b,): position of each sequence's first token, None for 0.
        interleaved: as the embedding was made.
        fused: no effect: the policy chooses the implementation.
        cu_seqlens: int32 (b + 1,), where sequences start; required for ``thd``.
        cp_size, cp_rank: context parallelism is not supported yet.

    Returns:
        Like t, contiguous.

    Raises:
        ValueError: shapes that do not fit, or cu_seqlens missing.
        NotImplementedError: cp_size or cp_rank.
    """
    if cp_size != 1 or cp_rank != 0:
        given = {"cp_size": cp_size, "cp_rank": cp_rank}
        reject_unsupported("apply_rotary_pos_emb", given, {"cp_size": 1, "cp_rank": 0})
    require_choice("tensor_format", tensor_format, LAYOUTS)
    require_tensor("t", t)
    t = plain(t)
    require_tensor("freqs", freqs, floating=False)
    if not freqs.is_floating_point():
        raise ValueError(f"freqs must be float32, got {freqs.dtype}")
    if freqs.device != t.device:
        raise ValueError(f"freqs must be on {t.device} as t is, got {freqs.device}")
    if t.dim() != len(tensor_format):
        raise ValueError(
            f"t must have {len(tensor_format)} dimensions for tensor_format={tensor_format!r}, "
            f"got shape {tuple(t.shape)}"
        )
    rotated = freqs.shape[-1] if freqs.dim() == 4 else 0
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or rotated > t.shape[-1] or rotated % 2:
        raise ValueError(
            f"freqs must be (s, 1, 1, r) with r even and at most {t.shape[-1]}, got shape {tuple(freqs.shape)}"
        )
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError("tensor_format='thd' needs cu_seqlens, got None")
    else:
        cu_seqlens = None
        length = t.shape[tensor_format.index("s")]
        if length > freqs.shape[0]:
            raise ValueError(f"freqs must cover {length} positions, the length of t, got {freqs.shape[0]}")
    if freqs.dtype != torch.float32:
        freqs = freqs.float()
    options = RopeOptions(tensor_format, interleaved)
    arguments = t, freqs, options, cu_seqlens, start_positions
    return outside_autocast(_run_rope, *arguments)  # type: ignore[no-any-return]


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide what a projection gave into queries, keys and values, and rotate the first two by their positions' angles.

    Differentiable. It is `apply_rotary_pos_emb` of both: no operator does all at once yet.

    Args:
        qkv: (s, b, g, n + d + e) or (b, s, g, n + d + e), as `tensor_format` says: for each of g groups its queries,
            n / d heads of d features, then a key of d features and a value of e.
        q_freqs, k_freqs: the angles of queries and of keys, as in `apply_rotary_pos_emb`.
        qkv_split_arg_list: n, d and e.
        tensor_format: ``sbhd`` or ``bshd``.
        start_positions, interleaved, cp_size, cp_rank: as in `apply_rotary_pos_emb`.
        cu_seqlens: no effect, as in Transformer Engine: ``thd`` is not supported.

    Returns:
        Queries (.., .., g * n / d, d), keys (.., .., g, d) and values (.., .., g, e), contiguous.

    Raises:
        ValueError: shapes that do not fit. NotImplementedError: cp_size or cp_rank.
    """
    require_choice("tensor_format", tensor_format, ("sbhd", "bshd"))
    require_tensor("qkv", qkv)
    sizes = list(qkv_split_arg_list)
    if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % sizes[1]:
        raise ValueError(
            "qkv_split_arg_list must be the features of queries, keys and values, with those of queries divisible by "
            f"those of keys, got {qkv_split_arg_list}"
        )
    if qkv.dim() != 4 or qkv.shape[-1] != sum(sizes):
        raise ValueError(f"qkv must have 4 dimensions, the last of {sum(sizes)}, got shape {tuple(qkv.shape)}")
    query, key, value = plain(qkv).split(sizes, dim=-1)
    query = query.reshape(*query.shape[:2], -1, sizes[1])
    rotated = (
        apply_rotary_pos_emb(part, freqs, tensor_format, start_positions, interleaved, cp_size=cp_size, cp_rank=cp_rank)
        for part, freqs in ((query, q_freqs), (key, k_freqs))
    )
    return (*rotated, value.contiguous())
