# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's environment variables that do nothing here, so that nobody believes they do.

Names: those that version 2.20 reads, those of its page on environment variables
(https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/envvars.html), and those of AMD's fork of it
(https://github.com/ROCm/TransformerEngine).
"""

from __future__ import annotations

from collections.abc import Mapping

from te_dispatch.core.policy.known import did_you_mean

#: Read by policies, by NVTE_DEBUG, by the ROCm backend or as defaults of recipes.
HONOURED = frozenset((
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_BACKWARD_OVERRIDE", "NVTE_CK_HOW_V3_BF16_CVT",
    "NVTE_CK_IS_V3_ATOMIC_FP32", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL", "NVTE_FLASH_ATTN",
    "NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "NVTE_FUSED_ATTN", "NVTE_FUSED_ATTN_AOTRITON", "NVTE_FUSED_ATTN_BACKEND",
    "NVTE_FUSED_ATTN_CK", "NVTE_NVFP4_4OVER6",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256", "NVTE_NVFP4_4OVER6_ERR_MODE", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "NVTE_UNFUSED_ATTN", "NVTE_USE_CAST_TRANSPOSE_TRITON", "NVTE_USE_DEQUANTIZE_TRITON", "NVTE_USE_LAYERNORM_TRITON",
    "NVTE_USE_RMSNORM_TRITON",
))  # fmt: skip

#: Of these nothing is said, because a run under PyTorch does not read them in Transformer Engine either, or reads them
#: only to find what was built. ``docs/policies.md`` lists them, and a test compares.
#: Read where Transformer Engine is built and packaged.
_BUILDS = frozenset((
    "NVTE_BUILD_ACTIVATION_WITH_FAST_MATH", "NVTE_BUILD_DEBUG", "NVTE_BUILD_LEGACY_STATIC_FUSED_SOFTMAX",
    "NVTE_BUILD_LEGACY_STATIC_NORM", "NVTE_BUILD_MAX_JOBS", "NVTE_BUILD_NUM_PHILOX_ROUNDS",
    "NVTE_BUILD_THREADS_PER_JOB", "NVTE_CCACHE_BIN", "NVTE_CMAKE_BUILD_DIR", "NVTE_CUDA_ARCHS", "NVTE_ENABLE_NVSHMEM",
    "NVTE_FRAMEWORK", "NVTE_PROJECT_BUILDING", "NVTE_PYTORCH_FORCE_BUILD", "NVTE_PYTORCH_FORCE_CXX11_ABI",
    "NVTE_PYTORCH_SKIP_CUDA_BUILD", "NVTE_RELEASE_BUILD", "NVTE_UB_WITH_MPI", "NVTE_USE_CCACHE", "NVTE_WITH_CUBLASMP",
    "NVTE_WITH_CUTEDSL", "NVTE_WITH_NCCL_EP",
))  # fmt: skip
#: Read by its modules for JAX.
_JAX = frozenset((
    "NVTE_FUSED_RING_ATTENTION_USE_SCAN", "NVTE_JAX_ALL_REDUCE_IN_FP32", "NVTE_JAX_CUSTOM_CALLS",
    "NVTE_JAX_CUSTOM_CALLS_RE", "NVTE_JAX_ENFORCE_TRITON_AUTOTUNING", "NVTE_JAX_ENFORCE_V2_GROUPED_GEMM",
    "NVTE_JAX_EP_NCCL_COMM_FROM_XLA", "NVTE_USE_PYTORCH_TRITON",
))  # fmt: skip
#: Read by its tests.
_TESTS = frozenset((
    "NVTE_JAX_UNITTEST_LEVEL", "NVTE_TEST_ARTIFACTS_DIR", "NVTE_TEST_NVINSPECT_CONFIG_FILE",
    "NVTE_TEST_NVINSPECT_ENABLED", "NVTE_TEST_NVINSPECT_FEATURE_DIRS",
))  # fmt: skip
ELSEWHERE = _BUILDS | _JAX | _TESTS

#: What NVTE_PLUGIN names where Transformer Engine itself is to call this project.
PLUGIN = "te_dispatch.compat.nvte_plugin"

_WITHOUT_EFFECT = frozenset((
    "NVTE_AG_P2P_MULTI_ATOMIC", "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "NVTE_APPLY_QK_LAYER_SCALING",
    "NVTE_BATCH_MHA_P2P_COMM", "NVTE_BIAS_DROPOUT_FUSION", "NVTE_BIAS_GELU_NVFUSION", "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "NVTE_COMPILE_OP_SIDE_EFFECTS", "NVTE_CPU_OFFLOAD_V1", "NVTE_CUDA_INCLUDE_DIR",
    "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP", "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM",
    "NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK", "NVTE_DEBUG_NUMERICS", "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP",
    "NVTE_DISABLE_NVRTC", "NVTE_DISABLE_TRITON_AUTOTUNING", "NVTE_DPA_FP8CS_O_in_F16", "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN", "NVTE_DPA_FP8DS_REDUCE_AMAX", "NVTE_DPA_FP8_FORMAT", "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_RECIPE_DPA", "NVTE_DPA_FP8_RECIPE_MHA", "NVTE_ENABLE_CUTEDSL_BACKEND", "NVTE_EXT_MARGIN_SM",
    "NVTE_FP8_DPA_BWD", "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION", "NVTE_FUSED_ATTN_USE_FAv2_BWD",
    "NVTE_FUSED_MLA_Q_UPROJ", "NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_GEMM_GELU_FUSION",
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM", "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
    "NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB", "NVTE_INF_LAYERNORM_SM_MARGIN", "NVTE_MASKED_SOFTMAX_FUSION",
    "NVTE_NORM_BWD_USE_CUDNN", "NVTE_NORM_FWD_USE_CUDNN", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "NVTE_NVTX_ENABLED",
    "NVTE_ONNX_KVCACHE_MAX_SEQ_LEN", "NVTE_PLUGIN", "NVTE_PRINT_LAYER_NUMBER", "NVTE_PRINT_RANK",
    "NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "NVTE_TORCH_COMPILE", "NVTE_UnfusedDPA_Emulate_FP8", "NVTE_UNFUSED_FP8_UPDATE",
    "NVTE_USE_CUTLASS_GROUPED_GEMM", "NVTE_USE_FAST_MATH", "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
))  # fmt: skip

#: Read by AMD's fork alone.
_ROCM = frozenset((
    "NVTE_CK_USES_BWD_V3", "NVTE_CK_USES_FWD_V3", "NVTE_ROCM_ENABLE_MXFP8", "NVTE_USE_ATOMIC_AMAX",
    "NVTE_USE_HIPBLASLT", "NVTE_USE_OPTIMIZED_HIPIFIED_CAST_TRANSPOSE",
))  # fmt: skip

_AITER = "AITER chooses between its kernels in assembly and those of Composable Kernel by itself"
#: What is said of those whose purpose is served otherwise.
_WHY = {
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "checkpoints are read without running what is in them",
    "NVTE_APPLY_QK_LAYER_SCALING": "logits are fp32 numbers here, so none overflows",
    "NVTE_CK_USES_BWD_V3": _AITER,
    "NVTE_CK_USES_FWD_V3": _AITER,
    "NVTE_ROCM_ENABLE_MXFP8": (
        "MXFP8 runs wherever a backend serves it and a recipe asks for it: autocast(recipe=MXFP8BlockScaling()); the "
        "default recipe is the same on every device, so that all ranks agree"
    ),
    "NVTE_USE_HIPBLASLT": "policies choose backends: TE_DISPATCH_PREFER=gemm=rocm",
    "NVTE_CUDA_INCLUDE_DIR": "no kernel here is compiled with headers from there",
    "NVTE_NVTX_ENABLED": "modules mark no ranges; nvtx_range_push and its kin read it for those that callers mark",
}
#: Transformer Engine sets it when it is imported, which is no wish of anybody's where it runs this project's plugin.
_SET_BY_ITSELF = "NVTE_CUDA_INCLUDE_DIR"
_PREFIX = "NVTE_"


def ignored(environ: Mapping[str, str]) -> dict[str, str]:
    """The NVTE_* variables that are set and do nothing: name -> what to say of it, in the order of names."""
    found = {}
    plugged = environ.get("NVTE_PLUGIN", "").strip() == PLUGIN
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in HONOURED or name in ELSEWHERE or not environ[name].strip():
            continue
        if plugged and name in ("NVTE_PLUGIN", _SET_BY_ITSELF):
            continue
        if name in _WITHOUT_EFFECT or name in _ROCM:
            why = _WHY.get(name, "te_dispatch does not act on this variable")
            found[name] = f"{name}={environ[name]} has no effect: {why}"
        else:
            hint = did_you_mean(name, sorted(HONOURED | _WITHOUT_EFFECT | _ROCM))
            found[name] = f"{name}={environ[name]} has no effect: there is no variable of this name{hint}"
    return found
