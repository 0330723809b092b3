# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers under Transformer Engine's names, for factories of `te_dispatch.common.recipe.CustomRecipe`.

Start reading at `quantizers`. The casts that operators carry out are `te_dispatch.numerics.quantizers`; this room turns
the one into the other. May import what the modules of `te_dispatch.pytorch` may, but no module.
"""

from te_dispatch.pytorch.quantized_tensor import QuantizedTensor
from te_dispatch.pytorch.tensor.dtypes import DType
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

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
]
