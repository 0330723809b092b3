# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Names of Transformer Engine 2.20 that are not here, as data: what the error says of each.

Names of its modules and of what is in them, wherever it has them. Those that only its own modules use, around its
kernels, are left out: docs/transformer_engine.md.
"""

from __future__ import annotations

_ABOUT: dict[str, tuple[str, ...]] = {
    "user buffers are not there; leave the arguments ub_* of modules at their defaults": (
        "UserBufferQuantizationMode",
        "destroy_ub",
        "fill_userbuffers_buffer_for_all_gather",
        "get_ub",
        "get_ub_is_fp8",
        "initialize_ub",
        "is_ub_initialized",
        "layers_atomic_ring_exchange",
        "using_cublasmp_backend",
    ),
    "symmetric memory is not there; leave the argument symmetric_ar_type of modules at None": (
        "get_symmetric_memory_tensor",
        "release_symm_mem_pool",
        "symm_mem_alloc",
        "symmetric_all_reduce",
        "symmetric_mem_cache",
    ),
    "use that of torch.distributed.fsdp, which modules work with": ("FullyShardedDataParallel",),
    "FP8GlobalStateManager says what is in force": ("FP8GlobalState",),
    "parameters are in high precision; an optimizer updates them as they are": (
        "cast_master_weights_to_fp8",
        "post_all_gather_processing",
        "quantize_master_weights",
    ),
    "a module keeps its quantized weights by itself: is_first_microbatch of its calls": ("quantize_weight",),
    "use te_dispatch.ops.gemm": ("cpp_extensions", "general_gemm", "get_workspace"),
    "use te_dispatch.ops.moe_permute and moe_unpermute, which record no gradients": (
        "moe_permute",
        "moe_permute_and_pad_with_probs",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
        "permutation",
    ),
    "use torch.nn.functional.cross_entropy": ("cross_entropy", "parallel_cross_entropy"),
    "use an optimizer of torch.optim, with fused=True where it has that": ("FusedAdam", "FusedSGD", "optimizers"),
    "use torch.autograd.graph.save_on_cpu": (
        "ManualOffloadSynchronizer",
        "cpu_offload",
        "cpu_offload_v1",
        "get_cpu_offload_context",
        "is_cpu_offload_enabled",
        "mark_not_offload",
    ),
    "use apply_rotary_pos_emb or apply_fused_qkv_rotary_pos_emb": ("FusedQKVRoPEFunc", "FusedRoPEFunc"),
    "DotProductAttention decides itself; get_attention_backend and `te-dispatch explain attention_fwd` say what serves "
    "a call and why": (
        "AttentionLogging",
        "FlashAttention",
        "FusedAttention",
        "FusedAttentionParams",
        "FusedAttnSpec",
        "UnfusedDotProductAttention",
        "backends",
        "get_fused_attn_spec",
        "no_op_logger",
    ),
    "FP8 attention is not there; leave fp8_dpa and fp8_mha of recipes at False": (
        "combine_and_dequantize",
        "combine_and_quantize",
        "get_attention_quantizers",
        "mxfp8_quantize_fast_path",
        "mxfp8_quantize_only",
        "mxfp8_transpose_swizzle",
        "print_quantizers",
    ),
    "context parallelism is not there; leave cp_group of modules at None": ("context_parallel",),
    "no cache of keys and values is there; leave inference_params of calls at None": (
        "KVCacheManager",
        "NonPagedKVCacheManager",
    ),
    "modules compile (docs/torch_compile.md)": (
        "record_compile_disabled",
        "warn_compile_eager_fallback",
        "warn_if_compile_disabled",
    ),
    "use a Linear for each group, or te_dispatch.ops.grouped_gemm": (
        "GroupedTensor",
        "GroupedTensorStorage",
        "is_module_grouped_tensor_path_supported",
        "mark_grouped_tensor",
        "resolve_grouped_linear_single_param_flags",
    ),
    "both copies of a tensor come from one cast; use one of the other quantizers": (
        "HybridQuantizedTensor",
        "HybridQuantizedTensorStorage",
        "quantizer_factory_zoo",
    ),
    "an IdentityQuantizer leaves a tensor as it is": ("IdentityTensor", "IdentityTensorStorage"),
    "linear attention is not there": (
        "GatedDeltaNet2Attention",
        "GatedDeltaNetAttention",
        "GatedDeltaProductAttention",
    ),
}

#: Name -> what the error says beside the name.
INSTEAD: dict[str, str] = {name: about for about, names in _ABOUT.items() for name in names}
