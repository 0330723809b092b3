# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the gemm family: cuBLASLt, with kernels of ours around it.

Claims. `deterministic`: NVIDIA promises equal bits from equal calls for one release and chip; sums that are split go
through the workspace and are added in order, never by atomics. Not `batch_invariant`: the library picks how it sums
by shape.

The library multiplies no e5m2 by e5m2. What a call asks beyond these requirements and the library refuses is declined
with the library's status.
"""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import AnyOf, Compare, Condition, MultipleOf, OneOf
from te_dispatch_cuda.implementations.native import FLOATS, kernel

_OCP = ("e4m3fn", "e5m2")
_BLOCKS = ("block_1d", "block_2d")
#: Casts whose scale is known before the product is; the others are done by `quantize`.
_CASTS: tuple[Condition, ...] = (
    OneOf("out_quantizer", None, "delayed"),
    OneOf("aux_quantizer", None, "delayed"),
    OneOf("aux.scaling", None, "none", "tensor"),
)
_MULTIPLIED: tuple[Condition, ...] = (
    OneOf("a.dtype", *_OCP),
    OneOf("b.dtype", *_OCP),
    AnyOf(OneOf("a.dtype", "e4m3fn"), OneOf("b.dtype", "e4m3fn")),
)
_TENSOR = (OneOf("a.scaling", "tensor"), OneOf("b.scaling", "tensor"))
# Blocks of 128 with fp32 scales: cuBLASLt has them for this one generation.
_BLOCK_SCALES = (
    OneOf("device.arch", "sm_90"),
    Compare("device.version.cublaslt", ">=", "12.9"),
    OneOf("a.scaling", *_BLOCKS),
    OneOf("b.scaling", *_BLOCKS),
)
_FP8 = (OneOf("device.fp8_matmul", True), *_MULTIPLIED)
_MICROSCALED = (Compare("device.arch", ">=", "sm_100"), Compare("device.version.cublaslt", ">=", "12.8"))
_PLAIN = (OneOf("a.dtype", *FLOATS), OneOf("b.dtype", *FLOATS), OneOf("a.scaling", "none"), OneOf("b.scaling", "none"))
_HOST_SPLITS, _DEVICE_SPLITS = OneOf("splits", "none", "host"), OneOf("splits", "device")
_GROUPED, _READ_BACK = "gemm_grouped:grouped_gemm", "gemm_grouped:grouped_gemm_device_splits"
_SYNCHRONIZES = frozenset({"deterministic"})


def _codes(name: str, *requires: Condition) -> Implementation:
    """A product of quantized operands."""
    return kernel(
        "gemm", "gemm:gemm_codes", (*requires, *_CASTS), name=name, plan="gemm:gemm_codes.plans.repeat",
        operand_format="gemm:operand_format",
    )  # fmt: skip


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("gemm", "gemm:gemm", (*_PLAIN, *_CASTS), name="cublaslt_gemm", plan="gemm:gemm.plans.repeat"),
    _codes("cublaslt_fp8_gemm", *_FP8, *_TENSOR),
    _codes("cublaslt_block_gemm", *_FP8, *_BLOCK_SCALES),
    _codes(
        "cublaslt_mxfp8_gemm",
        *_FP8,
        *_MICROSCALED,
        OneOf("a.scaling", "mxfp8"),
        OneOf("b.scaling", "mxfp8"),
        MultipleOf("k", 32),
        MultipleOf("n", 16),
    ),
    _codes(
        "cublaslt_nvfp4_gemm",
        *_MICROSCALED,
        OneOf("a.scaling", "nvfp4"),
        OneOf("b.scaling", "nvfp4"),
        MultipleOf("k", 32),
        MultipleOf("n", 32),
    ),
    kernel("grouped_gemm", _GROUPED, (*_PLAIN, _HOST_SPLITS), name="cublaslt_grouped_gemm"),
    kernel("grouped_gemm", _GROUPED, (*_FP8, *_TENSOR, _HOST_SPLITS), name="cublaslt_fp8_grouped_gemm"),
    kernel("grouped_gemm", _GROUPED, (*_FP8, *_BLOCK_SCALES, _HOST_SPLITS), name="cublaslt_block_grouped_gemm"),
    kernel(
        "grouped_gemm", _READ_BACK, (*_PLAIN, _DEVICE_SPLITS), _SYNCHRONIZES, name="cublaslt_grouped_gemm_device_splits"
    ),
    kernel(
        "grouped_gemm",
        _READ_BACK,
        (*_FP8, *_TENSOR, _DEVICE_SPLITS),
        _SYNCHRONIZES,
        name="cublaslt_fp8_grouped_gemm_device_splits",
    ),
)
