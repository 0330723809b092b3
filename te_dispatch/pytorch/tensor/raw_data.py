# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Moving the data of quantized tensors into memory of the caller's, such as one buffer for many parameters."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantized import NVFP4_SCALINGS
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

_SCALINGS = ("tensor", "block_1d", "block_2d", *NVFP4_SCALINGS)


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Copy a tensor's row-wise data into other memory, and have the tensor lie there from now on.

    Scales and the column-wise copy stay where they are.

    Args:
        tensor: of any format but MXFP8, as there.
        new_raw_data: uint8, of the shape and device of the data, contiguous.

    Raises:
        NotImplementedError: MXFP8, or no `QuantizedTensor`. ValueError: no row-wise copy, a slice of another tensor, or
            memory that does not fit.
    """
    if not isinstance(tensor, QuantizedTensor) or tensor._scaling not in _SCALINGS:
        got = f"{tensor._scaling} scaling" if isinstance(tensor, QuantizedTensor) else type(tensor).__name__
        raise NotImplementedError(
            f"replace_raw_data: {got} is not supported yet, only a QuantizedTensor of another format than MXFP8"
        )
    old = tensor._row_data
    if old is None or not tensor._whole:
        raise ValueError(f"replace_raw_data: {tensor!r} has no row-wise copy of its own")
    expected = old.dtype, tuple(old.shape), old.device
    got_memory = new_raw_data.dtype, tuple(new_raw_data.shape), new_raw_data.device
    if got_memory != expected or not new_raw_data.is_contiguous():
        raise ValueError(f"replace_raw_data: new_raw_data must be contiguous {expected}, got {got_memory}")
    new_raw_data.detach().copy_(old)
    tensor._row_data = new_raw_data
