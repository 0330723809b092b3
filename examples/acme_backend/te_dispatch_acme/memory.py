# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Between PyTorch's tensors and the arrays that the x1's kernels work on.

Results are allocated through `te_dispatch.ops.alloc` and nowhere else.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from te_dispatch.ops import alloc

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def single(name: str, x: torch.Tensor) -> F32:
    """fp32(x), exactly; shares memory with a float32 tensor, so it is read only.

    Raises:
        ValueError: x is not a tensor of float32, bfloat16 or float16.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name}: got {got}, expected a float32, bfloat16 or float16 tensor")
    values: F32 = x.detach().to(torch.float32).numpy()
    return values


def check_shape(name: str, x: torch.Tensor, expected: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless x has the expected shape, and dtype if one is given."""
    if tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(expected)}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name}: got dtype {x.dtype}, expected {dtype}")


def dtype_of(name: str, asked: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """The dtype of a result.

    Raises:
        ValueError: it is asked for in one of integers.
    """
    if asked is not None and not asked.is_floating_point:
        raise ValueError(f"{name}: got {asked}, expected a floating-point dtype")
    return asked or default


def result(role: str, values: F32, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor with the values rounded once to `dtype`."""
    return write(alloc.empty(role, tuple(values.shape), dtype, device), values)


def write(target: torch.Tensor, values: F32) -> torch.Tensor:
    """Round values into an existing tensor."""
    with torch.no_grad():
        # ascontiguousarray makes a vector of a scalar, such as the mean of a single row.
        return target.copy_(torch.from_numpy(np.ascontiguousarray(values).reshape(target.shape)))


def codes(role: str, values: U8, device: torch.device) -> torch.Tensor:
    """A new tensor of bytes."""
    target = alloc.empty(role, tuple(values.shape), torch.uint8, device)
    return target.copy_(torch.from_numpy(np.ascontiguousarray(values)))
