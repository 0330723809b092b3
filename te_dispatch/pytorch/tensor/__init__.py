# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers under Transformer Engine's names, for factories of `te_dispatch.common.recipe.CustomRecipe`.

Start reading at `quantizers`. The casts that operators carry out are `te_dispatch.numerics.quantizers`; this room turns
the one into the other. May import what the modules of `te_dispatch.pytorch` may, but no module.
"""

from te_dispatch.pytorch.quantized_tensor import QuantizedTensor
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
from te_dispatch.pytorch.tensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
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
