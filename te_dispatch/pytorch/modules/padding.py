# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Padding of grouped rows to what FP8 GEMMs need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.pytorch.arguments import require_tensor
from te_dispatch.pytorch.autograd.scoped import in_forward_scope
from te_dispatch.pytorch.compile import returned
from te_dispatch.pytorch.fp8.autocast import current_state, get_default_recipe
from te_dispatch.pytorch.tensor.quantized_tensor import plain


def pad_to_multiple(splits: Sequence[int], align_size: int) -> list[int]:
    """Each of `splits` rounded up to a multiple of `align_size`; 0 stays 0."""
    return [-(-rows // align_size) * align_size for rows in splits]


class _PadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: tuple[int, ...], padded: tuple[int, ...]) -> torch.Tensor:
        ctx.splits = splits, padded
        ctx.scope = scopes.capture()
        return returned(ops.pad_rows(x, splits, padded))

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ops.unpad_rows(dy.contiguous(), *ctx.splits), None, None


class _UnpadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: tuple[int, ...], padded: tuple[int, ...]) -> torch.Tensor:
        ctx.splits = splits, padded
        ctx.scope = scopes.capture()
        return returned(ops.unpad_rows(x, splits, padded))

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ops.pad_rows(dy.contiguous(), *ctx.splits), None, None


class _RowSplits(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be positive, got {num_gemms}")
        if align_size is not None and align_size < 1:
            raise ValueError(f"align_size must be positive, got {align_size}")
        self.num_gemms = num_gemms
        self.align_size = align_size

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"

    def _alignment(self) -> int:
        if self.align_size is not None:
            return self.align_size
        state = current_state()
        return (get_default_recipe() if state is None else state.recipe).row_alignment()

    def _splits(self, m_splits: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not isinstance(m_splits, Sequence) or not all(hasattr(rows, "__index__") for rows in m_splits):
            raise TypeError(f"m_splits must be a list of ints, got {m_splits!r}")
        splits = tuple(int(rows) for rows in m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"m_splits must hold num_gemms={self.num_gemms} numbers of rows, got {len(splits)}")
        if any(rows < 0 for rows in splits):
            raise ValueError(f"m_splits must not be negative, got {list(splits)}")
        return splits, tuple(pad_to_multiple(splits, self._alignment()))


class Fp8Padding(_RowSplits):
    """Append zero rows to every part of a grouped input, so that each has a multiple of `align_size` rows.

    Args:
        num_gemms: number of parts.
        align_size: None for what the recipe of the autocast around the call asks for: 16 for FP8 with a scale per
            tensor or block, 32 for MXFP8, 128 for NVFP4, ``quantization_alignment`` of a `CustomRecipe`; 16 outside of
            an autocast.

    Forward: inp (sum(m_splits), K) and m_splits, the rows of each part -> (sum(padded), K) and padded, a list.
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        splits, padded = self._splits(m_splits)
        _check_rows(inp, sum(splits), "sum(m_splits)")
        if splits == padded:
            return inp, list(splits)
        return _PadRows.apply(plain(inp).contiguous(), splits, padded), list(padded)


class Fp8Unpadding(_RowSplits):
    """Undo `Fp8Padding`.

    Arguments as there; without an `align_size`, call both under the same recipe.

    Forward: inp (sum(padded), K) and m_splits, the rows of each part *without* padding -> (sum(m_splits), K).
    """

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        splits, padded = self._splits(m_splits)
        _check_rows(inp, sum(padded), f"sum(m_splits), each rounded up to a multiple of {self._alignment()}")
        if splits == padded:
            return inp
        return _UnpadRows.apply(plain(inp).contiguous(), splits, padded)  # type: ignore[no-any-return]


def _check_rows(inp: torch.Tensor, rows: int, what: str) -> None:
    require_tensor("inp", inp, floating=False)
    if inp.dim() != 2 or inp.shape[0] != rows:
        raise ValueError(f"inp must be ({rows}, K), {rows} being {what}, got shape {tuple(inp.shape)}")
