# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`DType`: Transformer Engine's numbers for element types, as its quantizers take them."""

from __future__ import annotations

import enum
from typing import Any

import torch


class DType(enum.IntEnum):
    """Element types under Transformer Engine's names and numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


#: What stands for an FP8 family. The FNUZ dtypes stand for theirs: which encoding is meant is the device's to say.
_FAMILIES: dict[Any, str] = {
    DType.kFloat8E4M3: "e4m3",
    DType.kFloat8E5M2: "e5m2",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3",
    torch.float8_e5m2fnuz: "e5m2",
}


def fp8_family(owner: str, fp8_dtype: Any) -> str:
    """``e4m3`` or ``e5m2``.

    Args:
        fp8_dtype: a `DType` or its number, or a dtype of PyTorch.

    Raises:
        ValueError: another type; names it after `owner`.
    """
    try:
        return _FAMILIES[fp8_dtype]
    except (KeyError, TypeError):
        raise ValueError(
            f"{owner}: fp8_dtype must be DType.kFloat8E4M3, DType.kFloat8E5M2 or PyTorch's dtype, got {fp8_dtype!r}"
        ) from None
