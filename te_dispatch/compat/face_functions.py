# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's modules of functions that are here, as data: name -> where it is defined. Parts of `face`."""

from __future__ import annotations


def of(home: str, *names: str) -> dict[str, str]:
    """Names that are defined under the same names in a module of te_dispatch."""
    return {name: f"te_dispatch.{home}:{name}" for name in names}


GLU = of("pytorch.splitting", "deinterleave_glu_tensor", "interleave_glu_tensor")
TORCH_VERSION = of("pytorch.devices", "torch_version")

UTILS = {
    **GLU,
    **TORCH_VERSION,
    **of("pytorch.attention.masks", "attention_mask_func"),
    **of("pytorch.comparing", "all_close", "compare_tensors", "print_rank_0"),
    **of(
        "pytorch.devices",
        "canonicalize_device",
        "canonicalize_dtype",
        "canonicalize_process_group",
        "devices_match",
        "get_sm_count",
        "gpu_autocast_ctx",
        "torch_get_autocast_gpu_dtype",
    ),
    **of("pytorch.distributed.rng_tracker", "validate_ctx_manager", "validate_rng_states_func"),
    **of("pytorch.modules.gemm_steps", "cast_if_needed"),
    **of(
        "pytorch.modules.init_methods",
        "get_default_init_method",
        "init_method_constant",
        "init_method_normal",
        "scaled_init_method_normal",
    ),
    **of("pytorch.nvtx", "get_nvtx_range_context", "nvtx_range_pop", "nvtx_range_push"),
    **of(
        "pytorch.splitting",
        "SplitAlongDim",
        "ceil_div",
        "combine_tensors",
        "divide",
        "ensure_divisibility",
        "round_up_to_nearest_multiple",
        "split_tensor_along_dim",
    ),
    **of(
        "pytorch.fp8.support",
        "assert_dim_for_fp8_exec",
        "check_dim_for_fp8_exec",
        "check_gemm_dims",
        "get_cudnn_version",
        "get_device_compute_capability",
        "is_bf16_available",
        "is_bf16_compatible",
        "is_non_tn_fp8_gemm_supported",
    ),
    **of(
        "pytorch.tensor.memory",
        "assert_viewless_tensor",
        "clear_tensor_data",
        "get_cached_ones_tensor",
        "make_weak_ref",
        "needs_quantized_gemm",
        "requires_grad",
        "safely_set_viewless_tensor_data",
    ),
}

JIT = of(
    "pytorch.jit",
    "bgrad_dgelu_fused",
    "bgrad_dgelu_fused_",
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "bias_gelu_fused",
    "bias_gelu_fused_",
    "dgelu_fused_",
    "gelu_fused_",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "lazy_compile",
    "no_torch_dynamo",
    "set_jit_fusion_options",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
)

#: Of its `dot_product_attention.utils`.
ATTENTION = {
    **of(
        "pytorch.attention.backends",
        "AttentionParams",
        "FlashAttentionUtils",
        "FusedAttnBackend",
        "check_set_window_size",
        "get_attention_backend",
        "get_qkv_format",
    ),
    **of(
        "pytorch.attention.full_masks",
        "get_alibi",
        "get_full_mask",
        "get_padding_mask",
        "get_thd_padding_mask",
    ),
    **of("pytorch.attention.masks", "get_cu_seqlens"),
    **of(
        "pytorch.attention.memory_layouts",
        "get_qkv_layout",
        "qkv_layout_needs_detection",
        "transpose_to_bhsd_htd_pytorch",
    ),
    **of(
        "pytorch.attention.packing",
        "ConvertBSHDtoTHD",
        "ConvertTHDtoBSHD",
        "PackTensors",
        "UnpackTensor",
        "get_cu_seqlens_and_indices",
        "get_full_cu_seqlens",
        "get_indices",
    ),
    **of("pytorch.tensor.memory", "maybe_contiguous"),
}

GRAPH = {
    **of("pytorch.graphs.make_graphed_callables", "make_graphed_callables"),
    **of(
        "pytorch.graphs.outside",
        "graph_pool_handle",
        "is_graph_capturing",
        "restore_fp8_tensors",
        "save_fp8_tensors",
        "set_capture_end",
        "set_capture_start",
    ),
}

RECIPE_STATES = of(
    "pytorch.fp8.recipe_state",
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "RecipeState",
)

FACTORIES = of(
    "pytorch.fp8.quantizer_factories",
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
)
