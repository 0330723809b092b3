# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch <-> NumPy on the host.

Tensors of any device come in; `.cpu()` copies and synchronizes. bfloat16, which NumPy lacks, travels as the float32
that equals it. Results are allocated through `te_dispatch.ops.alloc` on the caller's device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from te_dispatch.ops import alloc

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, x: Any, *more: torch.dtype) -> None:
    """Raise ValueError unless x is a tensor of float32, bfloat16 or float16 (or of a dtype in `more`)."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: got {type(x).__name__}, expected a tensor")
    if x.dtype not in FLOATS + more:
        raise ValueError(f"{name}: got dtype {x.dtype}, expected float32, bfloat16 or float16")


def array(x: torch.Tensor) -> Array:
    """A copy on the host, never an alias: bfloat16 and float16 as float32, anything else as it is."""
    x = x.detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    return np.array(x.cpu().numpy())


def single(x: torch.Tensor) -> F32:
    """fp32(x), exact for the dtypes operators take."""
    return array(x).astype(np.float32, copy=False)


def double(x: torch.Tensor) -> F64:
    return array(x).astype(np.float64)


def rounded(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """Values as a host tensor of `dtype`, rounded to nearest even once.

    float64 -> bfloat16 passes through float32 rounded to odd, which leaves the later rounding to nearest correct: the
    last bit of an inexact float32 is set, so it can neither be nor hide a tie (Boldo and Melquiond, 2008).
    """
    values = np.ascontiguousarray(values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == torch.bfloat16:
            return torch.from_numpy(_to_odd(values) if values.dtype == np.float64 else values).to(dtype)
        if dtype == torch.float16:
            return torch.from_numpy(values.astype(np.float16))
        if dtype == torch.float32:
            return torch.from_numpy(values.astype(np.float32))
        return torch.from_numpy(values).to(dtype)


def _to_odd(values: F64) -> F32:
    # Not numpy.nextafter: it would walk from Inf to the largest float32 only with the sign's help.
    nearest = values.astype(np.float32)
    bits = nearest.view(np.int32)
    wide = nearest.astype(np.float64)
    # Magnitudes of one sign are ordered as their bit patterns: one less is the next towards zero.
    truncated = bits - (np.abs(wide) > np.abs(values)).astype(np.int32)
    odd = np.where((wide != values) & ~np.isnan(values), truncated | 1, bits).astype(np.int32)
    return odd.view(np.float32)


def write(target: torch.Tensor, values: Array) -> torch.Tensor:
    """Round `values` into an existing tensor of any device and strides; returns it."""
    with torch.no_grad():
        target.copy_(rounded(values, target.dtype).reshape(target.shape))
    return target


def result(role: str, values: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor of the result's role, rounded to `dtype`, on `device`."""
    return write(alloc.empty(role, tuple(values.shape), dtype, device), values)


def raw(x: torch.Tensor) -> NDArray[np.uint8]:
    """A matrix's bytes, (M, K * bytes per element), whatever its dtype."""
    if x.numel() == 0:  # PyTorch views no empty tensor as bytes
        return np.zeros((x.shape[0], x.shape[1] * x.element_size()), np.uint8)
    # One column, or one row, is contiguous with any stride, which a view as bytes refuses: a copy has the usual one.
    return x.detach().cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()


def from_raw(
    role: str, data: NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The inverse of `raw`, in a new tensor."""
    out = alloc.empty(role, shape, dtype, device)
    if out.numel():
        out.copy_(torch.from_numpy(np.ascontiguousarray(data)).view(dtype).reshape(shape))
    return out


def write_tensor(role: str, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor of the result's role on `device` with the values of another."""
    out = alloc.empty(role, tuple(values.shape), values.dtype, device)
    with torch.no_grad():
        return out.copy_(values)
