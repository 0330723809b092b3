# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the gemm family: hipBLASLt.

Claims. `capturable` and `no_host_sync`: a launch reads nothing back and takes its scalars by value. Not
`deterministic`: AMD promises no equal bits from equal calls, and some of the library's kernels add partial sums in the
order in which they come. Not `batch_invariant`: the library picks how it sums by shape.

What a call asks beyond these requirements and the library refuses is declined with the library's status.
"""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, MultipleOf, NoneOf, OneOf
from te_dispatch_rocm.archs import ARCHS, FNUZ, OCP

RANK = 100
FLOATS = ("fp32", "bf16", "fp16")
_ON_DEVICE = frozenset({"capturable", "no_host_sync"})
#: The chips that the library's interface is known for here, with a library that works on the one at hand.
AMD: tuple[Condition, ...] = (
    OneOf("device.vendor", "amd"),
    OneOf("device.arch", *ARCHS["amd"]),
    OneOf("device.hipblaslt", "ready"),
    Compare("device.version.hipblaslt", ">=", "0.10"),
)

#: The library's casts to 8 bits are not bound to the contract of casts, which is bitwise: `quantize` makes them.
_NO_CAST: tuple[Condition, ...] = (OneOf("out_quantizer", None), OneOf("aux_quantizer", None))
_PLAIN: tuple[Condition, ...] = (OneOf("a.dtype", *FLOATS), OneOf("b.dtype", *FLOATS))
# fp32 operands give fp32 alone; 16-bit ones give their own dtype or fp32.
_OUT_DTYPE: tuple[Condition, ...] = (
    AnyOf(NoneOf("a.dtype", "fp32"), OneOf("out_dtype", None, "fp32")),
    AnyOf(NoneOf("a.dtype", "bf16"), NoneOf("out_dtype", "fp16")),
    AnyOf(NoneOf("a.dtype", "fp16"), NoneOf("out_dtype", "bf16")),
)
_OUT: tuple[Condition, ...] = (
    AnyOf(NoneOf("a.dtype", "fp32"), OneOf("out.dtype", None, "fp32")),
    AnyOf(NoneOf("a.dtype", "bf16"), NoneOf("out.dtype", "fp16")),
    AnyOf(NoneOf("a.dtype", "fp16"), NoneOf("out.dtype", "bf16")),
)
_EPILOGUES: tuple[Condition, ...] = (
    # The library applies gelu and its derivative to what was accumulated, too.
    AnyOf(OneOf("epilogue", None, "bgrad_a", "bgrad_b"), OneOf("accumulate", False)),
    # One address of the library's serves the bias and its gradient.
    AnyOf(OneOf("epilogue", None, "gelu"), OneOf("bias", False)),
    # There is no kernel that sums an operand beside an fp32 product.
    AnyOf(
        OneOf("epilogue", None, "gelu", "dgelu"),
        All(NoneOf("a.dtype", "fp32"), NoneOf("out_dtype", "fp32"), NoneOf("out.dtype", "fp32")),
    ),
    OneOf("aux.scaling", None, "none"),
    # What release 1.2 answers for these chips. Matrix cores for training have more, which it is asked for.
    AnyOf(
        OneOf("epilogue", None),
        OneOf("device.arch", "gfx942", "gfx950"),
        All(OneOf("epilogue", "gelu"), OneOf("device.arch", "gfx1100"), OneOf("a.dtype", "bf16", "fp16")),
        All(OneOf("epilogue", "gelu"), OneOf("device.arch", "gfx1200", "gfx1201"), OneOf("a.dtype", "fp16")),
        All(OneOf("device.arch", "gfx90a"), OneOf("a.dtype", "fp16")),
    ),
)
_NO_EPILOGUE = OneOf("epilogue", None)

_ENCODINGS = AnyOf(
    All(OneOf("a.dtype", *FNUZ), OneOf("b.dtype", *FNUZ), OneOf("device.encodings", "e4m3fnuz")),
    All(OneOf("a.dtype", *OCP), OneOf("b.dtype", *OCP), OneOf("device.encodings", "e4m3fn")),
)
_FP8: tuple[Condition, ...] = (
    OneOf("device.fp8_matmul", True),
    _ENCODINGS,
)
# Blocks of 128 are in the library's list of scale modes and refused by it.
_TENSOR = (OneOf("a.scaling", "tensor"), OneOf("b.scaling", "tensor"))
_MXFP8: tuple[Condition, ...] = (
    OneOf("device.block_scaled_matmul", "mxfp8"),
    Compare("device.version.hipblaslt", ">=", "0.15"),
    OneOf("a.scaling", "mxfp8"),
    OneOf("b.scaling", "mxfp8"),
)
#: The library has kernels for whole blocks alone.
_WHOLE_BLOCKS: tuple[Condition, ...] = tuple(MultipleOf(size, 32) for size in ("m", "n", "k"))
_HOST_SPLITS, _DEVICE_SPLITS = OneOf("splits", "none", "host"), OneOf("splits", "device")
_GROUPED, _READ_BACK = "gemm_grouped:grouped_gemm", "gemm_grouped:grouped_gemm_device_splits"


def entry(
    op: str,
    name: str,
    target: str,
    *requires: Condition,
    claims: frozenset[str] = _ON_DEVICE,
    plan: str | None = None,
) -> Implementation:
    """An entry whose target and plan are each ``module:attribute`` within this backend."""
    return Implementation(
        f"{op}@1", name, f"te_dispatch_rocm.{target}", (*AMD, *requires), RANK, claims,
        plan=plan and f"te_dispatch_rocm.{plan}",
    )  # fmt: skip


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    entry(
        "gemm", "hipblaslt_gemm", "gemm:gemm", *_PLAIN, *_NO_CAST, *_OUT_DTYPE, *_OUT, *_EPILOGUES,
        plan="gemm:gemm.plans.repeat",
    ),
    entry(
        "gemm", "hipblaslt_fp8_gemm", "gemm:gemm_codes", *_FP8, *_TENSOR, *_NO_CAST, _NO_EPILOGUE,
        plan="gemm:gemm_codes.plans.repeat",
    ),
    entry(
        "gemm", "hipblaslt_mxfp8_gemm", "gemm:gemm_codes", *_FP8, *_MXFP8, *_NO_CAST, _NO_EPILOGUE, *_WHOLE_BLOCKS,
        plan="gemm:gemm_codes.plans.repeat",
    ),
    entry("grouped_gemm", "hipblaslt_grouped_gemm", _GROUPED, *_PLAIN, *_OUT_DTYPE, _HOST_SPLITS),
    entry("grouped_gemm", "hipblaslt_fp8_grouped_gemm", _GROUPED, *_FP8, *_TENSOR, _HOST_SPLITS),
    entry(
        "grouped_gemm", "hipblaslt_grouped_gemm_device_splits", _READ_BACK, *_PLAIN, *_OUT_DTYPE, _DEVICE_SPLITS,
        claims=frozenset(),
    ),
    entry(
        "grouped_gemm", "hipblaslt_fp8_grouped_gemm_device_splits", _READ_BACK, *_FP8, *_TENSOR, _DEVICE_SPLITS,
        claims=frozenset(),
    ),
)  # fmt: skip
