# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`QuantizedTensor`, a quantized record where PyTorch wants a tensor, and quantizers under Transformer Engine's names.

Start with `quantized_tensor`. `aten` says what PyTorch's operations do to one, `attributes` and `kinds` show it under
Transformer Engine's names, `raw_data` and `saving` are its functions of these names, `packing` takes records apart for
``save_for_backward``, `casting` casts inside autograd Functions. `memory` is about whose memory any tensor is.
`quantizers`, with their base in `quantizer`, are what a factory of `te_dispatch.common.recipe.CustomRecipe` returns;
operators take those of `te_dispatch.numerics.quantizers`.

May import what `te_dispatch.pytorch` may, and of its rooms `compile`.
"""

from te_dispatch.pytorch.tensor.dtypes import DType
from te_dispatch.pytorch.tensor.kinds import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
)
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor
from te_dispatch.pytorch.tensor.quantizer import Quantizer
from te_dispatch.pytorch.tensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.pytorch.tensor.raw_data import replace_raw_data
from te_dispatch.pytorch.tensor.saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "replace_raw_data",
    "restore_from_func_ctx",
    "restore_from_saved",
]
