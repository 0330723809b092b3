# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch modules: Transformer Engine's names, on any accelerator.

``import te_dispatch.pytorch as te`` where a script had ``import transformer_engine.pytorch as te``.

Start with `modules.linear`, a whole module, and "One step of an FP8 Linear" in docs/architecture.md, which also says
what each folder holds. May import: torch, `te_dispatch.ops`, `te_dispatch.core`, `te_dispatch.numerics`,
`te_dispatch.common` and `te_dispatch.torch_private`.
"""

from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.attention.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_dispatch.pytorch.capture.statistics import CaptureStats, capture_stats
from te_dispatch.pytorch.constants import CPLoadBalancingStrategy
from te_dispatch.pytorch.export import onnx_export
from te_dispatch.pytorch.fp8.autocast import autocast, fp8_autocast, get_default_recipe
from te_dispatch.pytorch.fp8.model_init import fp8_model_init, quantized_model_init
from te_dispatch.pytorch.fp8.quantizer_role import QuantizerRole
from te_dispatch.pytorch.fp8.support import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from te_dispatch.pytorch.graphs.make_graphed_callables import make_graphed_callables
from te_dispatch.pytorch.modules.layernorm_linear import LayerNormLinear
from te_dispatch.pytorch.modules.layernorm_mlp import LayerNormMLP
from te_dispatch.pytorch.modules.linear import Linear
from te_dispatch.pytorch.modules.multi_head_attention import MultiheadAttention
from te_dispatch.pytorch.modules.normalization import LayerNorm, RMSNorm
from te_dispatch.pytorch.modules.padding import Fp8Padding, Fp8Unpadding
from te_dispatch.pytorch.modules.sequential import Sequential
from te_dispatch.pytorch.modules.transformer_layer import TransformerLayer
from te_dispatch.pytorch.planning.module_plan import ModulePlan, PlanningError, TensorSpec, plan
from te_dispatch.pytorch.recompute.checkpoint import checkpoint
from te_dispatch.pytorch.tensor import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "CPLoadBalancingStrategy",
    "CaptureStats",
    "DType",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Fp8Padding",
    "Fp8Unpadding",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "ModulePlan",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "PlanningError",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "Sequential",
    "TensorSpec",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "capture_stats",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "onnx_export",
    "plan",
    "quantized_model_init",
]
