# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dividing sizes and tensors into parts."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.pytorch.tensor.quantized_tensor import plain
from te_dispatch.torch_private import foreach_copy

__all__ = [
    "SplitAlongDim",
    "ceil_div",
    "combine_tensors",
    "deinterleave_glu_tensor",
    "divide",
    "ensure_divisibility",
    "interleave_glu_tensor",
    "round_up_to_nearest_multiple",
    "split_and_copy",
    "split_tensor_along_dim",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise a ValueError unless the denominator divides the numerator."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of two integers.

    Raises:
        ValueError: there is a remainder.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient of two integers, rounded up.

    Raises:
        ValueError: the denominator is 0.
    """
    if denominator == 0:
        raise ValueError("denominator must not be 0")
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `value`.

    Raises:
        ValueError: `multiple` is 0.
    """
    return ceil_div(value, multiple) * multiple


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Equal parts of a tensor along `dim`: views, or copies with `contiguous_split_chunks`.

    Raises:
        ValueError: the size of the dimension is not divisible by `num_partitions`.
    """
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def split_and_copy(buffer: torch.Tensor, outputs: list[torch.Tensor], chunk_sizes: list[int]) -> None:
    """Copy the parts of a tensor into others.

    Args:
        buffer: (n, ..). outputs: tensors of the parts' shapes. chunk_sizes: sizes of the parts along the first
            dimension, whose sum is n.

    Raises:
        RuntimeError: shapes or sizes that do not fit.
    """
    foreach_copy(outputs, list(torch.split(buffer, chunk_sizes)))


def combine_tensors(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The tensor whose parts along dimension `dim` the given ones are, without a copy: what `torch.unbind` undoes.

    Args:
        tensors: n tensors of one shape. dim: where the new dimension of size n goes.

    Raises:
        ValueError: they are not such parts of one tensor, in their order.
    """
    first = tensors[0]
    step = (tensors[1].data_ptr() - first.data_ptr()) // first.element_size() if len(tensors) > 1 else first.numel()
    for place, tensor in enumerate(tensors):
        same = (tensor.shape, tensor.stride(), tensor.dtype) == (first.shape, first.stride(), first.dtype)
        address = first.data_ptr() + place * step * first.element_size()
        shared = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not shared or tensor.data_ptr() != address or step <= 0:
            raise ValueError("combine_tensors: the tensors are not the parts of one tensor along a dimension")
    dim = dim % (first.dim() + 1)
    shape, strides = list(first.shape), list(first.stride())
    shape.insert(dim, len(tensors))
    strides.insert(dim, step)
    return first.detach().as_strided(shape, strides)


class SplitAlongDim(torch.autograd.Function):
    """`torch.split` whose backward joins gradients without a copy where they are the parts of one tensor already.

    That is so where what follows computes the gradients of queries, keys and values into one buffer.
    ``SplitAlongDim.apply(mixed_x_layer, split_dim, split_size_or_sections, squeeze=False)``:

        mixed_x_layer: any shape.
        split_dim: the dimension.
        split_size_or_sections: the size of every part but the last, or the sizes of all, as in `torch.split`.
        squeeze: leave the dimension away, which must then be 1 in every part.

    Returns:
        The parts, as views. A `QuantizedTensor` gives the parts of its values.

    Raises:
        ValueError: `squeeze` of a part with another size than 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed_x_layer: torch.Tensor,
        split_dim: int,
        split_size_or_sections: int | list[int] | tuple[int, ...],
        squeeze: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        parts = torch.split(plain(mixed_x_layer), split_size_or_sections, dim=split_dim)  # type: ignore[arg-type]
        ctx.dim, ctx.squeeze = split_dim % mixed_x_layer.dim(), squeeze
        if not squeeze:
            return tuple(parts)
        sizes = [part.shape[ctx.dim] for part in parts]
        if any(size != 1 for size in sizes):
            raise ValueError(f"SplitAlongDim: squeeze=True needs parts of size 1 along dim {split_dim}, got {sizes}")
        return tuple(part.squeeze(ctx.dim) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.squeeze:
            grads = tuple(grad.unsqueeze(ctx.dim) for grad in grads)
        # A graph of this backward (create_graph=True) must see all parts, and a compiled one cannot ask for addresses.
        traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
        whole = None if traced else _whole(grads, ctx.dim)
        return torch.cat(grads, ctx.dim) if whole is None else whole, None, None, None


def _whole(parts: tuple[torch.Tensor, ...], dim: int) -> torch.Tensor | None:
    """The tensor that `torch.split` along `dim` made `parts` of; None if they are no such parts."""
    first = parts[0]
    if type(first) is not torch.Tensor:
        return None
    offset, storage = first.storage_offset(), first.untyped_storage()
    others = (*first.shape[:dim], *first.shape[dim + 1 :])
    for part in parts:
        if (
            type(part) is not torch.Tensor
            or part.dtype != first.dtype
            or part.stride() != first.stride()
            or (*part.shape[:dim], *part.shape[dim + 1 :]) != others
            or part.untyped_storage().data_ptr() != storage.data_ptr()
            or part.storage_offset() != offset
        ):
            return None
        offset += part.shape[dim] * part.stride(dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(shape, first.stride())


def _reordered(tensor: torch.Tensor, interleave_size: int, halves_first: bool) -> torch.Tensor:
    """Swap the two outer levels of dimension 0, blocks and halves, of which `halves_first` says which is the outer."""
    if isinstance(interleave_size, bool) or not isinstance(interleave_size, int) or interleave_size < 1:
        raise ValueError(f"interleave_size must be a positive int, got {interleave_size!r}")
    rows = tensor.shape[0]
    if rows % (2 * interleave_size):
        raise ValueError(f"dimension 0 must be divisible by 2 * interleave_size = {2 * interleave_size}, got {rows}")
    blocks = rows // (2 * interleave_size)
    outer = (2, blocks) if halves_first else (blocks, 2)
    return tensor.reshape(*outer, interleave_size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """From gate and linear half one after the other to blocks of both in turn, along dimension 0.

    Args:
        tensor: (2 * n, ...): a weight or bias of a gated linear unit's first product.
        interleave_size: rows of each block; divides n.

    Returns:
        (2 * n, ...), the first `interleave_size` rows of the gate, as many of the linear half, the next of the gate
        and so on; a copy.

    Raises:
        ValueError: an `interleave_size` that is no positive int, or rows that it does not divide.
    """
    return _reordered(tensor, interleave_size, halves_first=True)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of `interleave_glu_tensor`, with its arguments and errors."""
    return _reordered(tensor, interleave_size, halves_first=False)
