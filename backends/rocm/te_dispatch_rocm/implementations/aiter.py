# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries on AITER.

Claims: none. AITER promises no equal bits from equal products, asks for tuned configurations of a shape from files on
the disk, and compiles kernels when they are first called, which no capture survives.
"""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, MultipleOf, OneOf

RANK = 100
_HALF = ("bf16", "fp16")
#: Chips that AITER has prebuilt kernels for and the package's own releases.
AITER: tuple[Condition, ...] = (
    OneOf("device.vendor", "amd"),
    OneOf("device.arch", "gfx942", "gfx950"),
    Compare("device.version.aiter", ">=", "0.1"),
)
_BLOCKS: tuple[Condition, ...] = (
    OneOf("a.scaling", "block_1d"),
    OneOf("b.scaling", "block_2d"),
    AnyOf(
        All(OneOf("a.dtype", "e4m3fnuz"), OneOf("b.dtype", "e4m3fnuz"), OneOf("device.encodings", "e4m3fnuz")),
        All(OneOf("a.dtype", "e4m3fn"), OneOf("b.dtype", "e4m3fn"), OneOf("device.encodings", "e4m3fn")),
    ),
    OneOf("alpha.one", True),
    OneOf("accumulate", False),
    OneOf("bias", False),
    OneOf("epilogue", None),
    OneOf("aux_quantizer", None),
    OneOf("out_quantizer", None),
    OneOf("out_dtype", None, *_HALF),
    OneOf("out.dtype", None, *_HALF),
    MultipleOf("n", 128),
    MultipleOf("k", 128),
)


def _same_dtype(result: str) -> Condition:
    """The other 16-bit tensor has q's dtype; the operator's None means so."""
    return AnyOf(OneOf(result, None), *(All(OneOf("q.dtype", d), OneOf(result, d)) for d in _HALF))


_ATTENTION: tuple[Condition, ...] = (
    OneOf("q.dtype", *_HALF),
    OneOf("q.scaling", "none"),
    OneOf("layout", "sbhd", "bshd"),
    OneOf("mask", "none", "causal", "causal_bottom_right"),
    OneOf("attn_mask", False),
    OneOf("bias_type", "none"),
    OneOf("softmax_type", "vanilla"),
    OneOf("softcap", False),
    OneOf("dropout", False),  # drawn from a generator
    OneOf("s_quantizer", None),
    OneOf("same_head_dim", True),
    MultipleOf("head_dim", 8),
    Compare("head_dim", "<=", 256),
)
_FORWARD = (OneOf("page_table", False), OneOf("with_max_logit", False), OneOf("out_quantizer", None))
_BACKWARD = (OneOf("dp_quantizer", None), OneOf("dqkv_quantizer", None), _same_dtype("dout.dtype"))


def _entry(op: str, name: str, target: str, *requires: Condition, **more: object) -> Implementation:
    return Implementation(
        f"{op}@1", name, f"te_dispatch_rocm.{target}", (*AITER, *requires), RANK, frozenset(), **more,  # type: ignore[arg-type]
    )  # fmt: skip


_TRAITS = frozenset({"fused", "flash", "vendor_library", "ck"})
_FORMAT = "rocm.aiter_attention/1"
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _entry("gemm", "aiter_block_gemm", "aiter_gemm:gemm", *_BLOCKS),
    _entry(
        "attention_fwd", "aiter_attention", "aiter_attention:attention_fwd", *_ATTENTION, *_FORWARD,
        _same_dtype("out_dtype"), traits=_TRAITS, saved_format=_FORMAT,
    ),
    _entry(
        "attention_bwd", "aiter_attention_bwd", "aiter_attention:attention_bwd", *_ATTENTION, *_BACKWARD,
        traits=_TRAITS, saved_format=_FORMAT,
    ),
)  # fmt: skip
