# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The modules of Transformer Engine 2.20 that are here, as data: module -> name -> where it is defined.

A name is added where it does here what it does there. A module without names of its own stands for its submodules.
"""

from __future__ import annotations

from te_dispatch.compat.face_functions import (
    ATTENTION,
    FACTORIES,
    GLU,
    GRAPH,
    JIT,
    RECIPE_STATES,
    TORCH_VERSION,
    UTILS,
)
from te_dispatch.compat.face_functions import of as _of

#: What `transformer_engine.__version__` and its distribution's metadata say: the release whose interface is offered.
VERSION = "2.20.2"

ROOT = "transformer_engine"

#: Its native module, of which the numbers are here that something takes.
NATIVE = "transformer_engine_torch"


_AVAILABLE = _of(
    "pytorch.fp8.support",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
)
_REGIONS = _of("pytorch.fp8.autocast", "autocast", "fp8_autocast")
_AUTOCAST = {**_REGIONS, **_of("pytorch.fp8.autocast", "get_default_recipe")}
_MODEL_INIT = _of("pytorch.fp8.model_init", "fp8_model_init", "quantized_model_init")
_GLOBAL = _of("pytorch.fp8.global_state", "FP8GlobalStateManager")
_ROLE = {
    **_of("pytorch.fp8.quantizer_role", "QuantizerRole"),
    **_of("pytorch.fp8.quantizer_request", "DelayedScalingRequest", "QuantizerRequest"),
}
_QUANTIZATION = {
    **_AVAILABLE,
    **_AUTOCAST,
    **_MODEL_INIT,
    **_ROLE,
    **_of(
        "pytorch.fp8.support",
        "check_fp8_block_scaling_support",
        "check_fp8_support",
        "check_mxfp8_support",
        "check_nvfp4_support",
        "check_recipe_support",
        "get_align_size_for_quantization",
        "get_fp4_te_dtype",
        "get_fp8_max",
        "get_fp8_te_dtype",
        "get_fp8_torch_dtype",
    ),
    **_of("pytorch.splitting", "split_and_copy"),
    **RECIPE_STATES,
    **_GLOBAL,
    "get_default_fp8_recipe": "te_dispatch.pytorch.fp8.autocast:get_default_recipe",
}
_ROTARY = _of("pytorch.attention.rotary", "RotaryPositionEmbedding")
_ROPE = {**_ROTARY, **_of("pytorch.attention.rotary", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb")}
_DOT_PRODUCT = _of("pytorch.attention.dot_product", "DotProductAttention")
_MULTI_HEAD = _of("pytorch.modules.multi_head_attention", "MultiheadAttention")
_LINEAR = _of("pytorch.modules.linear", "Linear")
_LAYERNORM_LINEAR = _of("pytorch.modules.layernorm_linear", "LayerNormLinear")
_LAYERNORM_MLP = _of("pytorch.modules.layernorm_mlp", "LayerNormMLP")
_LAYERNORM = _of("pytorch.modules.normalization", "LayerNorm")
_RMSNORM = _of("pytorch.modules.normalization", "RMSNorm")
_PADDING = _of("pytorch.modules.padding", "Fp8Padding")
_UNPADDING = _of("pytorch.modules.padding", "Fp8Unpadding")
_MODULES = {
    **_LINEAR, **_LAYERNORM_LINEAR, **_LAYERNORM_MLP, **_LAYERNORM, **_RMSNORM, **_PADDING, **_UNPADDING,
}  # fmt: skip
_BASE = {
    "TransformerEngineBaseModule": "te_dispatch.pytorch.modules.gemm_module:GemmModule",
    **_of("pytorch.modules.main_grads", "get_dummy_wgrad"),
}
_LAYER = _of("pytorch.modules.transformer_layer", "TransformerLayer")
_ONNX = _of("pytorch.export", "onnx_export")
_TENSOR = _of("pytorch.tensor.quantized_tensor", "QuantizedTensor")
_STORAGE = _of("pytorch.tensor.kinds", "QuantizedTensorStorage")
_FLOAT8_STORAGE = _of("pytorch.tensor.kinds", "Float8TensorStorage")
_FLOAT8_BLOCK_STORAGE = _of("pytorch.tensor.kinds", "Float8BlockwiseQTensorStorage")
_MXFP8_STORAGE = _of("pytorch.tensor.kinds", "MXFP8TensorStorage")
_NVFP4_STORAGE = _of("pytorch.tensor.kinds", "NVFP4TensorStorage")
_STORAGES = {**_FLOAT8_STORAGE, **_FLOAT8_BLOCK_STORAGE, **_MXFP8_STORAGE, **_NVFP4_STORAGE}
_FLOAT8_TENSOR = _of("pytorch.tensor.kinds", "Float8Tensor")
_FLOAT8_BLOCK_TENSOR = _of("pytorch.tensor.kinds", "Float8BlockwiseQTensor")
_MXFP8_TENSOR = _of("pytorch.tensor.kinds", "MXFP8Tensor")
_NVFP4_TENSOR = _of("pytorch.tensor.kinds", "NVFP4Tensor")
_TENSORS = {**_TENSOR, **_FLOAT8_TENSOR, **_FLOAT8_BLOCK_TENSOR, **_MXFP8_TENSOR, **_NVFP4_TENSOR}
_RAW_DATA = _of("pytorch.tensor.raw_data", "replace_raw_data")
_SAVING = _of("pytorch.tensor.saving", "prepare_for_saving", "restore_from_func_ctx", "restore_from_saved")
_QUANTIZER = _of("pytorch.tensor", "Quantizer")
_FLOAT8 = _of("pytorch.tensor", "Float8CurrentScalingQuantizer", "Float8Quantizer")
_FLOAT8_BLOCK = _of("pytorch.tensor", "Float8BlockQuantizer")
_HYBRID = _of("pytorch.tensor", "HybridQuantizer")
_IDENTITY = _of("pytorch.tensor", "IdentityQuantizer")
_MXFP8 = _of("pytorch.tensor", "MXFP8Quantizer")
_NVFP4 = _of("pytorch.tensor", "NVFP4Quantizer")
_QUANTIZERS = {**_QUANTIZER, **_FLOAT8, **_FLOAT8_BLOCK, **_HYBRID, **_IDENTITY, **_MXFP8, **_NVFP4}
_DTYPE = _of("pytorch.tensor", "DType")
_DTYPES = {**_DTYPE, **_of("pytorch.tensor.dtypes", "TE_DType", "TE_DType_To_Torch")}
_QUANTIZED = {**_TENSOR, **_STORAGE, **_QUANTIZER, **_SAVING}
_CHECKPOINT = _of("pytorch.recompute.checkpoint", "checkpoint")
_RECOMPUTE = _of(
    "pytorch.recompute.phases",
    "activation_recompute_forward",
    "get_activation_recompute_contexts",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
)
_RANDOM = {"CudaRNGStatesTracker": "te_dispatch.pytorch.distributed.rng_tracker:RngStatesTracker"}
_COLLECTIVES = _of(
    "pytorch.distributed.collectives",
    "allreduce",
    "gather_along_first_dim",
    "gather_split_1d_tensor",
    "get_distributed_rank",
    "get_distributed_world_size",
    "initialize_affine_weight_gpu",
    "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
)

FACE: dict[str, dict[str, str]] = {
    "transformer_engine": {},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _of(
        "common.recipe",
        "CustomRecipe",
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "MMParams",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "QParams",
        "Recipe",
    ),
    "transformer_engine.pytorch": {
        **_MODULES,
        **_DOT_PRODUCT,
        **_MULTI_HEAD,
        **_LAYER,
        **_TENSORS,
        **_STORAGE,
        **_STORAGES,
        **_SAVING,
        **_QUANTIZERS,
        **_DTYPE,
        **_ROLE,
        **_AUTOCAST,
        **_MODEL_INIT,
        **_CHECKPOINT,
        **_RANDOM,
        **_ROTARY,
        **_ONNX,
        **_of("pytorch.graphs.make_graphed_callables", "make_graphed_callables"),
        **_AVAILABLE,
        **GLU,
        **_of("pytorch.fp8.support", "get_cudnn_version"),
        **_of("pytorch.constants", "CPLoadBalancingStrategy"),
    },
    "transformer_engine.pytorch.custom_recipes": {},
    "transformer_engine.pytorch.custom_recipes.quantizer_factories": FACTORIES,
    "transformer_engine.pytorch.quantization": _QUANTIZATION,
    "transformer_engine.pytorch.fp8": _QUANTIZATION,
    "transformer_engine.pytorch.constants": {
        **_DTYPES,
        "FP8BwdTensorIdx": "te_dispatch.pytorch.tensor.dtypes:FP8BwdTensors",
        "FP8FwdTensorIdx": "te_dispatch.pytorch.tensor.dtypes:FP8FwdTensors",
        **_of(
            "pytorch.constants",
            "AttnBiasTypes",
            "AttnMaskTypes",
            "AttnTypes",
            "CPLoadBalancingStrategy",
            "GemmParallelModes",
            "LayerTypes",
            "MXFP8_BLOCK_SCALING_SIZE",
            "NVFP4_BLOCK_SCALING_SIZE",
            "QKVLayouts",
            "dist_group_type",
        ),
    },
    "transformer_engine.pytorch.distributed": {
        **_CHECKPOINT,
        **_of("pytorch.recompute.checkpoint", "use_reentrant_activation_recompute"),
        **_RANDOM,
        **_RECOMPUTE,
        **_COLLECTIVES,
        **_REGIONS,
        **_GLOBAL,
        **_of(
            "pytorch.distributed.rng_tracker",
            "get_all_rng_states",
            "graph_safe_rng_available",
            "is_graph_safe_rng_state",
            "set_all_rng_states",
        ),
        **_of("pytorch.modules.classes", "get_te_classes"),
        **_of("pytorch.fp8.saved_module", "has_te_modules"),
    },
    "transformer_engine.pytorch.export": {
        **_ONNX,
        **_of("pytorch.devices", "TORCH_MAJOR", "TORCH_MINOR"),
        **_of("pytorch.export", "is_in_onnx_export_mode", "te_translation_table"),
        **_of("pytorch.fp8.state_views", "assert_warmed_up"),
    },
    "transformer_engine.pytorch.graph": GRAPH,
    "transformer_engine.pytorch.jit": JIT,
    "transformer_engine.pytorch.torch_version": TORCH_VERSION,
    "transformer_engine.pytorch.utils": UTILS,
    "transformer_engine.pytorch.transformer": {**_LAYER, **_of("pytorch.modules.dropout_add", "DropPath")},
    "transformer_engine.pytorch.attention": {
        **_DOT_PRODUCT,
        **_MULTI_HEAD,
        **_ROTARY,
    },
    "transformer_engine.pytorch.attention.inference": {},
    "transformer_engine.pytorch.attention.rope": _ROPE,
    "transformer_engine.pytorch.attention.dot_product_attention": _DOT_PRODUCT,
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention": _DOT_PRODUCT,
    "transformer_engine.pytorch.attention.dot_product_attention.utils": ATTENTION,
    "transformer_engine.pytorch.attention.multi_head_attention": _MULTI_HEAD,
    "transformer_engine.pytorch.module": _MODULES,
    "transformer_engine.pytorch.module.base": _BASE,
    "transformer_engine.pytorch.module.linear": _LINEAR,
    "transformer_engine.pytorch.module.layernorm_linear": _LAYERNORM_LINEAR,
    "transformer_engine.pytorch.module.layernorm_mlp": _LAYERNORM_MLP,
    "transformer_engine.pytorch.module.layernorm": _LAYERNORM,
    "transformer_engine.pytorch.module.rmsnorm": _RMSNORM,
    "transformer_engine.pytorch.module.fp8_padding": _PADDING,
    "transformer_engine.pytorch.module.grouped_linear": {},
    "transformer_engine.pytorch.module.fp8_unpadding": _UNPADDING,
    "transformer_engine.pytorch.ops": {},
    "transformer_engine.pytorch.router": {},
    "transformer_engine.pytorch.tensor": {
        **_TENSORS,
        **_STORAGE,
        **_STORAGES,
        **_QUANTIZERS,
        **_SAVING,
        **_RAW_DATA,
        **_of("pytorch.tensor.kinds", "get_all_tensor_types"),
    },
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": {**_FLOAT8_BLOCK, **_FLOAT8_BLOCK_TENSOR},
    "transformer_engine.pytorch.tensor.float8_tensor": {**_FLOAT8, **_FLOAT8_TENSOR},
    "transformer_engine.pytorch.tensor.hybrid_tensor": _HYBRID,
    "transformer_engine.pytorch.tensor.identity_tensor": _IDENTITY,
    "transformer_engine.pytorch.tensor.mxfp8_tensor": {**_MXFP8, **_MXFP8_TENSOR},
    "transformer_engine.pytorch.tensor.nvfp4_tensor": {**_NVFP4, **_NVFP4_TENSOR},
    "transformer_engine.pytorch.tensor.quantized_tensor": _QUANTIZED,
    "transformer_engine.pytorch.tensor.storage": _STORAGES,
    "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage": _FLOAT8_BLOCK_STORAGE,
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": _FLOAT8_STORAGE,
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": _MXFP8_STORAGE,
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": _NVFP4_STORAGE,
    "transformer_engine.pytorch.tensor.utils": {
        **_RAW_DATA,
        **_of("pytorch.tensor.kinds", "clear_columnwise_cache"),
    },
    "transformer_engine.pytorch.float8_tensor": _FLOAT8_TENSOR,
    "transformer_engine.pytorch.quantized_tensor": _QUANTIZED,
    NATIVE: {
        **_DTYPE,
        **_of("pytorch.tensor.dtypes", "FP8BwdTensors", "FP8FwdTensors"),
        "NVTE_Fused_Attn_Backend": "te_dispatch.pytorch.attention.backends:FusedAttnBackend",
    },
}

#: Names without which Megatron, Automodel or BioNeMo do not import, although most of their models never use them: they
#: raise where they are used.
ABSENT: dict[str, frozenset[str]] = {
    "transformer_engine.pytorch": frozenset({"GroupedLinear", "InferenceParams"}),
    "transformer_engine.pytorch.attention": frozenset({"InferenceParams"}),
    "transformer_engine.pytorch.attention.inference": frozenset({"InferenceParams", "PagedKVCacheManager"}),
    "transformer_engine.pytorch.module": frozenset({"GroupedLinear"}),
    "transformer_engine.pytorch.module.grouped_linear": frozenset({"GroupedLinear"}),
    "transformer_engine.pytorch.ops": frozenset(
        {
            *("AllReduce", "BasicLinear", "Bias", "FusibleOperation", "GEGLU", "GELU", "LayerNorm", "ReGLU", "ReLU"),
            *("ReduceScatter", "RMSNorm", "Sequential", "SiLU", "SwiGLU"),
        }
    ),
    "transformer_engine.pytorch.router": frozenset(
        {"fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"}
    ),
}


def submodules(module: str) -> list[str]:
    """The last parts of the modules directly below `module`."""
    prefix = module + "."
    below = (name.removeprefix(prefix) for name in FACE if name.startswith(prefix))
    return sorted(name for name in below if "." not in name)
