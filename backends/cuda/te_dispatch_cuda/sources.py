# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a cast reads, as the integers of csrc/cast/source_arguments.h: every native cast takes them after the stream.

Addresses are `prepared.Given`: a source tells kinds of calls apart, and is made when one is prepared. The tensors that
come first in such a call are those that the source names.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.activation import CLAMPED_SWIGLU
from te_dispatch.ops.shapes import rows_of
from te_dispatch_cuda.codes import DTYPES, ENCODINGS
from te_dispatch_cuda.memory import dense, empty
from te_dispatch_cuda.prepared import Given

#: (form, dtype, rows, columns, x, stride, dy, kind, limit, alpha, x_encoding, x_scale_inv)
Source = tuple[int, int, int, int, Given, int, Any, int, float, float, int, Any]

#: Activations as csrc/activation/functions.cuh numbers them; 8 says gated.
KINDS = {
    "gelu": 0,
    "qgelu": 1,
    "relu": 2,
    "srelu": 3,
    "silu": 4,
    "geglu": 8,
    "qgeglu": 9,
    "reglu": 10,
    "sreglu": 11,
    "swiglu": 12,
    "glu": 13,
    "clamped_swiglu": 14,
}
_GATED = 8


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a dense copy of it where `plain` cannot describe it."""
    if x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1):
        return x
    return dense(x)


def plain(x: torch.Tensor) -> Source:
    """(x) that is `readable`, as the matrix that its leading dimensions flatten to."""
    shape = x.shape
    columns = shape[-1]
    if len(shape) == 2:
        rows = shape[0]
        stride = columns if rows < 2 else x.stride(0)
    else:
        rows, stride = rows_of(x.shape), columns
    return (0, DTYPES[x.dtype], rows, columns, Given(0), stride, 0, 0, 0.0, 0.0, -1, 0)


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, or a copy in another dtype."""
    if x.dtype == dtype:
        return x
    target = empty("workspace", tuple(x.shape), dtype, x.device)
    target.copy_(x)
    return target


def forward(x: torch.Tensor | Quantized, kind: str, params: tuple[float, float] | None) -> Source:
    """An activation of (x), dense, or of (codes, their scale_inv) of a tensor-scaled record's row-wise copy."""
    code = KINDS[kind]
    limit, alpha = params or CLAMPED_SWIGLU
    columns = x.shape[-1] // 2 if code >= _GATED else x.shape[-1]
    rows = rows_of(x.shape)
    if isinstance(x, Quantized):
        return (1, 0, rows, columns, Given(0), 0, 0, code, limit, alpha, ENCODINGS[x.encoding], Given(1))
    return (1, DTYPES[x.dtype], rows, columns, Given(0), 0, 0, code, limit, alpha, -1, 0)


def backward(dy: torch.Tensor, x: torch.Tensor | Quantized, kind: str, params: tuple[float, float] | None) -> Source:
    """An activation's gradient, of (dy, x), dense and of one dtype, or of (dy, codes, their scale_inv)."""
    code = KINDS[kind]
    limit, alpha = params or CLAMPED_SWIGLU
    dtype, rows, columns = DTYPES[dy.dtype], rows_of(x.shape), x.shape[-1]
    if isinstance(x, Quantized):
        return (2, dtype, rows, columns, Given(1), 0, Given(0), code, limit, alpha, ENCODINGS[x.encoding], Given(2))
    return (2, dtype, rows, columns, Given(1), 0, Given(0), code, limit, alpha, -1, 0)
