# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The native functions of Transformer Engine 2.20 as data: which are served here, which are passed on, and why.

`MANIFEST` has an entry for each of the 161 functions that ``transformer_engine_torch`` declares in its main binding
file. `OTHERS` are the names besides them that Transformer Engine's Python reads from the module.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Releases of Transformer Engine whose functions this table describes: the start of their version.
RELEASE = "2.20"

#: The native module's name, and the one under which Transformer Engine keeps it beside a plugin.
MODULE = "transformer_engine_torch"
NATIVE = f"{MODULE}_nv"


@dataclass(frozen=True)
class Served:
    """A function that operators of this project carry out.

    Attributes:
        family: the module of this package whose `ADAPTERS` has the function.
        operator: the operator behind it.
        passes_on: the calls that go to the native function nevertheless.
    """

    family: str
    operator: str
    passes_on: str


@dataclass(frozen=True)
class PassedOn:
    """A function that stays the native one, and why."""

    reason: str


_NOT_PLAIN = "tensors of subclasses"
_QUANTIZER = f"with a quantizer; {_NOT_PLAIN}"
_BACKWARD = f"{_QUANTIZER}; dy and x of two dtypes"
_OFFSET = "glu_linear_offset other than 1"
_NORM = f"{_NOT_PLAIN}; x not of two dimensions; a 16-bit weight of another dtype than x; sm_margin other than 0"
_NORM_FORWARD = f"with a quantizer or ln_out; {_NORM}; an output that is no float32, bfloat16 or float16"
_ROPE = f"{_NOT_PLAIN}; cp_size other than 1; layouts other than sbhd, bshd and thd"
_MOE = f"{_NOT_PLAIN}; FP8 codes"

SERVED: dict[str, Served] = {
    **{
        name: Served("activations", "activation_fwd", _QUANTIZER)
        for name in (
            "gelu", "glu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "silu", "srelu", "sreglu", "swiglu",
        )
    },
    "clamped_swiglu": Served("activations", "activation_fwd", f"{_QUANTIZER}; {_OFFSET}"),
    **{
        name: Served("activations", "activation_bwd", _BACKWARD)
        for name in (
            "dgelu", "dglu", "dgeglu", "dqgelu", "dqgeglu", "drelu", "dreglu", "dsilu", "dsrelu", "dsreglu", "dswiglu",
            "dbias_dgelu", "dbias_dqgelu", "dbias_drelu", "dbias_dsilu", "dbias_dsrelu",
        )
    },
    "clamped_dswiglu": Served("activations", "activation_bwd", f"{_BACKWARD}; {_OFFSET}"),
    "layernorm_fwd": Served("norms", "layernorm_fwd", _NORM_FORWARD),
    "layernorm_bwd": Served("norms", "layernorm_bwd", _NORM),
    "rmsnorm_fwd": Served("norms", "rmsnorm_fwd", _NORM_FORWARD),
    "rmsnorm_bwd": Served("norms", "rmsnorm_bwd", _NORM),
    "rmsnorm_bwd_add": Served("norms", "rmsnorm_bwd", _NORM),
    "scaled_softmax_forward": Served("softmaxes", "softmax_fwd", _NOT_PLAIN),
    "scaled_masked_softmax_forward": Served("softmaxes", "softmax_fwd", f"{_NOT_PLAIN}; a mask that is not bool"),
    "scaled_upper_triang_masked_softmax_forward": Served("softmaxes", "softmax_fwd", _NOT_PLAIN),
    "scaled_aligned_causal_masked_softmax_forward": Served(
        "softmaxes", "softmax_fwd", f"{_NOT_PLAIN}; more queries than keys"
    ),
    **{
        f"scaled_{kind}softmax_backward": Served("softmaxes", "softmax_bwd", _NOT_PLAIN)
        for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    },
    "fused_rope_forward": Served("rope", "rope_fwd", _ROPE),
    "fused_rope_backward": Served("rope", "rope_bwd", _ROPE),
    "moe_permute_fwd": Served("experts", "moe_permute", _MOE),
    "moe_permute_bwd": Served("experts", "moe_unpermute", _MOE),
    "moe_unpermute_fwd": Served("experts", "moe_unpermute", _MOE),
    "moe_unpermute_bwd": Served("experts", "moe_unpermute_bwd", f"{_MOE}; without probabilities"),
    "fused_multi_row_padding": Served("experts", "pad_rows", _NOT_PLAIN),
    "fused_multi_row_unpadding": Served("experts", "unpad_rows", _NOT_PLAIN),
    "multi_tensor_adam": Served(
        "multi_tensor", "multi_tensor_adam", f"{_NOT_PLAIN}; moments or masters that are not float32; several dtypes"
    ),
    "multi_tensor_l2norm": Served("multi_tensor", "multi_tensor_l2norm", f"{_NOT_PLAIN}; several dtypes"),
    "multi_tensor_scale": Served("multi_tensor", "multi_tensor_scale", f"{_NOT_PLAIN}; several dtypes"),
    "compute_amax": Served("scales", "compute_amax", _NOT_PLAIN),
    "fused_amax_and_scale_update_after_reduction": Served(
        "scales", "update_delayed_scales", "a margin that is no integer; dtypes other than E4M3 and E5M2"
    ),
    "fp8_transpose": Served(
        "scales", "transpose_quantized", f"{_NOT_PLAIN}; a tensor to write to; dtypes other than E4M3 and E5M2"
    ),
    "dequantize": Served("scales", "dequantize", "tensors of scalings other than one FP8 scale a tensor"),
    "generic_gemm": Served(
        "products",
        "gemm",
        "operands of scalings other than one FP8 scale a tensor, or without the copy that the bound product reads; a "
        "quantized output; two operands of different dtypes; overlapped communication; GELU in a gradient; GELU or a "
        "bias's gradient in FP8; a beta that is not what accumulate means; a bias gradient of a wider dtype",
    ),
}  # fmt: skip

#: The reason -> the functions.
_REASONS: dict[str, tuple[str, ...]] = {
    "makes, reads or fills its own quantized tensors": (
        "bgrad_group_quantize", "bgrad_quantize", "create_empty_quantized_tensor", "group_dequantize",
        "group_quantize", "group_requantize_inplace", "multi_tensor_quantize", "nvfp4_group_quantize_with_amax",
        "nvfp4_quantize_with_amax", "quantize", "split_quantize",
    ),
    "lays out scales for its own matrix products": (
        "grouped_swizzle_for_gemm", "multi_tensor_pad_last_dim", "multi_tensor_swizzle_scales_for_gemm_",
        "swizzle_scales_for_gemm_",
    ),
    "multiplies its own quantized tensors by groups": (
        "get_grouped_gemm_setup_workspace_size", "te_general_grouped_gemm", "te_general_grouped_gemm_for_discrete_in",
        "te_general_grouped_gemm_for_discrete_out", "te_general_grouped_gemm_for_grouped_tensor",
    ),
    "its arguments and the backend that was asked for before belong together, and are its own enumerations": (
        "fused_attn_bwd", "fused_attn_fwd", "get_fused_attn_backend",
    ),
    "lays out operands of its own attention": (
        "convert_bshd_to_thd", "convert_thd_to_bshd", "copy_to_kv_cache", "fa_prepare_bwd", "fa_prepare_fwd",
        "multi_tensor_transpose_to_bhsd",
    ),
    "a step of context parallelism, for which there is no operator": (
        "thd_copy_valid_tokens_from_per_split_to_rank_local", "thd_cp_rank_order_to_sequence_order",
        "thd_get_partitioned_indices", "thd_grad_correction", "thd_out_correction", "thd_read_half_tensor",
        "thd_read_second_half_lse", "thd_second_half_lse_correction", "thd_sequence_order_to_cp_rank_order",
    ),
    "there is no operator for it": (
        "dsituglu", "fused_moe_aux_loss_bwd", "fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe",
        "fused_qkv_rope_backward", "fused_qkv_rope_forward", "fused_score_for_moe_aux_loss_bwd",
        "fused_score_for_moe_aux_loss_fwd", "fused_topk_with_score_function_bwd", "fused_topk_with_score_function_fwd",
        "fused_topk_with_score_function_qb_fwd", "multi_tensor_sgd", "situglu", "swap_first_dims",
    ),
    "there is no operator with a factor for each row": (
        "group_scaled_clamped_swiglu", "group_scaled_swiglu", "scaled_clamped_dswiglu", "scaled_clamped_swiglu",
        "scaled_dsituglu", "scaled_dsrelu", "scaled_dswiglu", "scaled_situglu", "scaled_srelu", "scaled_swiglu",
    ),
    "its mask has another layout, and its random state is its own": ("dropout_bwd", "dropout_fwd"),
    "takes numbers from device memory that the operator takes from the host": (
        "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_scale_tensor",
        "multi_tensor_unscale_l2norm",
    ),
    "keeps parameters in a form for which there is no operator": (
        "multi_tensor_adam_fp8", "multi_tensor_adam_param_remainder",
    ),
    "a step of casting sharded parameters in its own containers": (
        "fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast",
        "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0",
        "mxfp8_scaling_compute_partial_amax", "mxfp8_scaling_partial_cast", "nvfp4_2d_compute_partial_amax",
        "nvfp4_2d_multi_tensor_transpose", "nvfp4_2d_partial_cast", "nvfp4_compute_global_scale",
        "nvfp4_compute_per_block_scale", "nvfp4_data_transpose", "nvfp4_expand_scale_to_fp8", "nvfp4_fused_scale",
        "nvfp4_multi_tensor_2d_partial_cast", "nvfp4_multi_tensor_compute_partial_amax",
        "nvfp4_multi_tensor_fused_scale",
    ),
    "communicates": (
        "bulk_overlap_ag_with_external_gemm", "create_nvshmem_tensor", "init_nvshmem_backend", "nvshmem_finalize",
        "nvshmem_send_on_current_stream", "nvshmem_wait_on_current_stream",
    ),
    "a solver of its own": ("cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz"),
    "tells about, or prepares memory for, the native library": (
        "bulk_allocate", "copy_data_ptrs_to_device", "get_cublasLt_version", "get_cudnn_version",
        "get_num_cublas_streams", "splits_to_offsets", "splits_to_offsets_multi",
    ),
}  # fmt: skip

MANIFEST: dict[str, Served | PassedOn] = {
    **SERVED,
    **{name: PassedOn(reason) for reason, names in _REASONS.items() for name in names},
}

#: Classes, enumerations, and functions that the native module declares elsewhere: passed on.
OTHERS = frozenset((
    "CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "CommOverlapType", "DType", "FP8BwdTensors", "FP8FwdTensors",
    "FP8TensorMeta", "LayerNorm", "NVTEQBHistogramMode", "NVTERoutingMapFormat", "NVTEScalingMode", "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout", "NVTE_Softmax_Type",
    "device_supports_multicast", "ep_combine", "ep_combine_bwd", "ep_dispatch", "ep_dispatch_bwd", "ep_finalize",
    "ep_get_zero_copy", "ep_handle_mem_size", "ep_initialize", "ep_prepare", "ep_prepare_and_dispatch",
    "ep_zero_copy_supported", "get_stream_priority_range", "grouped_mlp_experimental",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_", "nvfp4_2d_scale_transpose", "ubuf_built_with_mpi",
))  # fmt: skip
