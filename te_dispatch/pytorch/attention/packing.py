# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Between padded batches and packed tokens, under Transformer Engine's names.

A padded batch has s places for each of b sequences; packed, the tokens of all sequences follow each other. Indices say
where tokens are in the batch: int64 (b s, 1, 1), first those of the tokens, in order, then b s for each place without.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.pytorch.attention.masks import get_cu_seqlens

__all__ = [
    "ConvertBSHDtoTHD",
    "ConvertTHDtoBSHD",
    "PackTensors",
    "UnpackTensor",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_indices",
]


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device | str | None) -> torch.Tensor:
    """int32 (b + 1,): the cumulative lengths of b sequences of `max_seqlen` tokens each."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def get_indices(max_seqlen: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The indices of tokens in batches of `max_seqlen` places, as this module's docstring describes them.

    Args:
        cu_seqlens: int32 (b + 1,), cumulative lengths.
    """
    places = torch.arange(max_seqlen, device=cu_seqlens.device)
    return _indices((places < cu_seqlens.diff()[:, None]).flatten())


def get_cu_seqlens_and_indices(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`get_cu_seqlens` of a padding mask, bool (b, 1, 1, s) with True for padding, and `get_indices`.

    Raises:
        ValueError: another dtype or shape.
    """
    return get_cu_seqlens(mask), _indices(mask.logical_not().flatten())


def _indices(tokens: torch.Tensor) -> torch.Tensor:
    """Of bool (b s,), True for tokens. Nothing is read from the device."""
    places = tokens.numel()
    order = torch.argsort(tokens.logical_not().to(torch.uint8), stable=True)
    among = torch.arange(places, device=tokens.device) < tokens.sum()
    return torch.where(among, order, places).view(-1, 1, 1)


def _pack(indices: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    room = torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))
    return room[indices.flatten()]


def _unpack(indices: torch.Tensor, places: int, tensor: torch.Tensor) -> torch.Tensor:
    room = tensor.new_zeros(places + 1, *tensor.shape[1:])
    room[indices.flatten()] = tensor
    return room[:-1]


class PackTensors(torch.autograd.Function):
    """Packs padded batches. ``PackTensors.apply(indices, *tensors)``:

        indices: of `get_indices`. tensors: (b s, h, d) each.

    Returns:
        (b s, h, d) for each, a tuple of several: the tokens, then zeros.
    """

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not tensors:
            raise ValueError("PackTensors: at least one tensor must be given")
        ctx.save_for_backward(indices)
        ctx.places = [tensor.shape[0] for tensor in tensors]
        packed = tuple(_pack(indices, tensor) for tensor in tensors)
        return packed if len(packed) > 1 else packed[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return None, *(_unpack(indices, places, grad) for places, grad in zip(ctx.places, grads, strict=True))


class UnpackTensor(torch.autograd.Function):
    """What `PackTensors` undoes. ``UnpackTensor.apply(indices, dim0, tensor)``:

        indices: of `get_indices`. dim0: b s. tensor: (b s, h, d), packed.

    Returns:
        (b s, h, d), zeros where there is no token.
    """

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, dim0: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        return _unpack(indices, dim0, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return None, None, _pack(indices, grad)


class ConvertTHDtoBSHD:
    """``ConvertTHDtoBSHD.apply(thd_tensor, cu_seqlens, max_seqlen)``: tokens to a padded batch; differentiable."""

    @staticmethod
    def apply(thd_tensor: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        """Put each sequence's tokens first in its row.

        Args:
            thd_tensor: (t, h, d). cu_seqlens: int32 (b + 1,), where sequences start and end. max_seqlen: s.

        Returns:
            (b, s, h, d), zeros where there is no token.
        """
        places = torch.arange(max_seqlen, device=cu_seqlens.device)
        there = places < cu_seqlens.diff()[:, None]
        rows = torch.where(there, cu_seqlens[:-1, None] + places, thd_tensor.shape[0])
        room = torch.cat((thd_tensor, thd_tensor.new_zeros(1, *thd_tensor.shape[1:])))
        return room[rows]


class ConvertBSHDtoTHD:
    """``ConvertBSHDtoTHD.apply(bshd_tensor, cu_seqlens, num_tokens)``: a padded batch to tokens; differentiable."""

    @staticmethod
    def apply(bshd_tensor: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Put the tokens of all sequences behind each other.

        Args:
            bshd_tensor: (b, s, h, d), each sequence's tokens first in its row. cu_seqlens: int32 (b + 1,), where
                sequences start and end. num_tokens: t, of the result.

        Returns:
            (t, h, d), zeros behind the last sequence.
        """
        batch, length = bshd_tensor.shape[:2]
        tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
        start = cu_seqlens[sequence.clamp(max=batch - 1)]
        rows = torch.where(sequence < batch, sequence * length + tokens - start, batch * length)
        flat = bshd_tensor.reshape(batch * length, *bshd_tensor.shape[2:])
        return torch.cat((flat, flat.new_zeros(1, *flat.shape[1:])))[rows]
