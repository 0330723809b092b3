# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's tensor classes, as what ``isinstance`` can be asked with.

There each format is a class. Here all are a `QuantizedTensor`, and a class of this file says which format it is: a
tensor of MXFP8 is an instance of `MXFP8Tensor` and of `MXFP8TensorStorage`. None can be called. A tensor is made by a
quantizer.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from te_dispatch.numerics.quantized import NVFP4_SCALINGS
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

#: None for every scaling.
_Scalings = "tuple[str, ...] | None"


def _of_kind(kind: Any, x: Any) -> bool:
    """Whether x is a `QuantizedTensor` of a class of this file; a class derived from one has its own instances."""
    if "scalings" not in vars(kind):
        return type.__instancecheck__(kind, x)
    return isinstance(x, QuantizedTensor) and (kind.scalings is None or x._scaling in kind.scalings)


def _refuse(kind: type, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{kind.__name__} cannot be made of its parts: cast with a quantizer of te_dispatch.pytorch.tensor, or make a "
        "QuantizedTensor"
    )


class _TensorKind(type(QuantizedTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, x: Any) -> bool:
        return _of_kind(cls, x)


class _StorageKind(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return _of_kind(cls, x)


class QuantizedTensorStorage(metaclass=_StorageKind):
    """Any `QuantizedTensor`."""

    scalings: _Scalings = None
    __new__ = _refuse  # type: ignore[assignment]


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale per tensor."""

    scalings = ("tensor",)


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 with one scale per 1x128 or 128x128 values."""

    scalings = ("block_1d", "block_2d")


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8."""

    scalings = ("mxfp8",)


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4."""

    scalings = NVFP4_SCALINGS


class Float8Tensor(QuantizedTensor, metaclass=_TensorKind):
    """FP8 with one scale per tensor."""

    scalings: _Scalings = ("tensor",)
    __new__ = _refuse  # type: ignore[assignment]


class Float8BlockwiseQTensor(QuantizedTensor, metaclass=_TensorKind):
    """FP8 with one scale per 1x128 or 128x128 values."""

    scalings: _Scalings = ("block_1d", "block_2d")
    __new__ = _refuse  # type: ignore[assignment]


class MXFP8Tensor(QuantizedTensor, metaclass=_TensorKind):
    """MXFP8."""

    scalings: _Scalings = ("mxfp8",)
    __new__ = _refuse  # type: ignore[assignment]


class NVFP4Tensor(QuantizedTensor, metaclass=_TensorKind):
    """NVFP4."""

    scalings: _Scalings = NVFP4_SCALINGS
    __new__ = _refuse  # type: ignore[assignment]


def get_all_tensor_types() -> list[type]:
    """The classes that tensors have which modules here take or give: PyTorch's two, and those of this file."""
    return [
        torch.Tensor,
        torch.nn.Parameter,
        Float8Tensor,
        Float8TensorStorage,
        MXFP8Tensor,
        MXFP8TensorStorage,
        Float8BlockwiseQTensor,
        Float8BlockwiseQTensorStorage,
        NVFP4Tensor,
        NVFP4TensorStorage,
    ]


def clear_columnwise_cache(tensor: QuantizedTensor) -> None:
    """Drop the column-wise copy of a quantized tensor that has a row-wise one as well; of one without, nothing.

    Raises:
        RuntimeError: there is no other copy.
    """
    if tensor.get_usages()["columnwise"]:
        tensor.update_usage(columnwise_usage=False)
