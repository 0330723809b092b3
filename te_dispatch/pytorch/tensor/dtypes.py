# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's numbers: of element types, as its quantizers take them, and of a module's tensors."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core import scopes

if TYPE_CHECKING:
    from typing_extensions import Self


class Number(enum.IntEnum):
    """An enumeration of Transformer Engine's, which takes its members and their numbers alike."""

    @classmethod
    def cast(cls, number: int) -> Self:
        """A member for one or its number.

        Raises:
            ValueError: no number of one.
        """
        return cls(int(number))


class DType(Number):
    """Element types under Transformer Engine's names and numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8FwdTensors(enum.IntEnum):
    """Places in the list ``module.quantizers["scaling_fwd"]``: three for each weight of a module."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Places in the list ``module.quantizers["scaling_bwd"]``: two for each weight of a module."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


#: PyTorch's dtypes as Transformer Engine's numbers.
TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}

#: The other way round.
TE_DType_To_Torch: dict[DType, torch.dtype] = {number: dtype for dtype, number in TE_DType.items()}


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


def device_encodings(device: torch.device) -> tuple[str, ...]:
    """FP8 encodings of a device, best first; empty where it has none or nothing is known about it."""
    found = scopes.capture().device_facts(device)["encodings"]
    return found if isinstance(found, tuple) else ()
