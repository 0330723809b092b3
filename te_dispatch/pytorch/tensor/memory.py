# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whose memory a tensor is: letting go of it, sharing it, keeping it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "assert_viewless_tensor",
    "clear_tensor_data",
    "get_cached_ones_tensor",
    "make_weak_ref",
    "maybe_contiguous",
    "needs_quantized_gemm",
    "requires_grad",
    "safely_set_viewless_tensor_data",
]


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether one of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Whether a product with `obj` is one of quantized operands: False for plain tensors and parameters.

    Args:
        rowwise: no effect, both copies of a tensor are quantized or neither.
    """
    return type(obj) not in (torch.Tensor, torch.nn.Parameter)


def maybe_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where its elements lie side by side in the last dimension, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def get_cached_ones_tensor(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """ones (num_elements,), the same tensor for the same arguments, whose memory stays where it is."""
    return torch.ones(num_elements, dtype=dtype, device=device)


def clear_tensor_data(*tensors: torch.Tensor | None) -> None:
    """Let go of the memory of tensors that something else still refers to; they are empty afterwards.

    None and tensors with an attribute ``_do_not_clear`` are left alone.

    Raises:
        TypeError: a `QuantizedTensor`, which cannot be empty; nothing is cleared. Delete the references to it.
    """
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensor):
            raise TypeError("clear_tensor_data: a QuantizedTensor cannot be emptied; delete the references to it")
    for tensor in tensors:
        if tensor is not None and not hasattr(tensor, "_do_not_clear"):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """`tensor`, unless it is a view of another tensor.

    Args:
        tensor: a list is looked through; what is no tensor is returned as it is. extra_msg: ends the error's message.

    Raises:
        ValueError: a view, which would keep its base alive.
    """
    if isinstance(tensor, list):
        return [assert_viewless_tensor(item, extra_msg) for item in tensor]
    if isinstance(tensor, torch.Tensor) and tensor._base is not None:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} is a view of one of shape {tuple(tensor._base.shape)}, whose "
            f"memory it keeps; give a tensor that is no view{'' if extra_msg is None else '. ' + extra_msg}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: torch.Tensor, new_data_tensor: torch.Tensor) -> None:
    """``tensor.data = new_data_tensor``.

    Raises:
        ValueError: `tensor` is a view; nothing is assigned.
    """
    assert_viewless_tensor(tensor, f"The new data have shape {tuple(new_data_tensor.shape)}")
    tensor.data = new_data_tensor


class _Memory:
    """Bytes on a GPU that somebody else owns, as PyTorch's protocol for foreign memory describes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address if nbytes else 0, False), "version": 3,
        }  # fmt: skip


def make_weak_ref(x: Any) -> Any:
    """The same tensors without a reference that keeps their memory.

    A GPU's allocator may give the memory to others as soon as `x` is gone: for outputs of CUDA graphs, in whose pool it
    stays. Whoever reads the result has to know that the memory still is what it was.

    Args:
        x: a tensor; tuples, lists and dicts of such; numbers, bools and None. A tensor on another device than a GPU is
            returned as it is.

    Raises:
        TypeError: anything else, and a `QuantizedTensor`.
    """
    if isinstance(x, QuantizedTensor):
        raise TypeError("make_weak_ref: a QuantizedTensor has several tensors; make references to those")
    if isinstance(x, torch.Tensor):
        return _weak(x) if x.is_cuda else x
    if isinstance(x, tuple):
        return tuple(make_weak_ref(item) for item in x)
    if isinstance(x, list):
        return [make_weak_ref(item) for item in x]
    if isinstance(x, dict):
        return {key: make_weak_ref(item) for key, item in x.items()}
    if x is None or isinstance(x, bool | int | float):
        return x
    raise TypeError(f"make_weak_ref: x must be made of tensors, numbers and None, got {type(x).__name__}")


def _weak(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    data = torch.as_tensor(_Memory(x.data_ptr(), extent * x.element_size()), device=x.device)
    return data.view(x.dtype).as_strided(x.shape, x.stride())
