# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operator calls that between them launch every kernel in every form: regions of the conformance kit's spaces, at sizes
of a transformer's layers."""

from __future__ import annotations

from te_dispatch.conformance.blank import Region, region
from te_dispatch.ops.activation import KINDS

_FP8 = "e4m3fn e5m2 e4m3fnuz e5m2fnuz"
_CASTS = "current block_1d block_2d mxfp8 nvfp4"
_LAYER = "8192x4096"


def _cast(space: str, **axes: str) -> tuple[Region, ...]:
    """Every kind of cast, with delayed scaling to other encodings, too."""
    return (
        region(space, cast=_CASTS, usage="row both", **axes),
        region(space, cast="delayed", encoding="e4m3fn e4m3fnuz e5m2", usage="row both", **axes),
    )


_WIDE, _GELU = "8192x16384", "gelu swiglu"
_ACTIVATION = (
    region("activation_fwd.plain", shape=_WIDE, kind=" ".join(KINDS)),
    region("activation_bwd.plain", shape=_WIDE, kind=" ".join(KINDS), dbias="yes"),
    *_cast("activation_fwd.plain", shape=_WIDE, kind=_GELU),
    *_cast("activation_bwd.plain", shape=_WIDE, kind=_GELU, dbias="no yes"),
    region("activation_fwd.plain", shape=_WIDE, record="delayed", x_encoding="e4m3fn e4m3fnuz"),
    region(
        "activation_bwd.plain", shape=_WIDE, record="delayed", x_encoding="e4m3fn e4m3fnuz",
        cast="delayed", encoding="e5m2", usage="both", dbias="yes",
    ),
)  # fmt: skip

_LONG = {"shape": "2x1024x1024", "heads": "32/8", "dtype": "bf16"}


def _attention(space: str, **axes: str) -> tuple[Region, ...]:
    """Both directions, without the gradient of a bias where there is none."""
    forward = {name: value for name, value in axes.items() if name != "dbias"}
    return region(f"attention_fwd.{space}", **forward), region(f"attention_bwd.{space}", **axes)


_ATTENTION = (
    *_attention("plain", **_LONG, mask="causal", dims="64/64 128/128 192/128 256/256"),
    *_attention("plain", **{**_LONG, "dtype": "fp16"}, mask="causal", dims="128/128"),
    *_attention("plain", **{**_LONG, "dtype": "fp32"}, mask="causal", dims="64/64 128/128 256/256"),
    # Outputs, and their gradients, may be wider than the operands.
    *_attention("plain", **_LONG, mask="causal", dims="128/128 256/256", out="fp32"),
    *_attention("plain", **_LONG, mask="none", dims="128/128"),
    region("attention_fwd.plain", **_LONG, dims="128/128", max_logit="yes"),
    *_attention("masked", **_LONG, mask="causal_bottom_right", window="512:0", dims="128/128"),
    *_attention("masked", **_LONG, mask="arbitrary", attn_mask="b1qk", dims="128/128"),
    *_attention("masked", **_LONG, mask="padding_causal", dims="128/128"),
    *_attention("scored", **_LONG, bias="alibi", dims="128/128", dbias="no"),
    *_attention("scored", **_LONG, bias="post_scale", bias_shape="1h", bias_dtype="bf16", dims="128/128"),
    *_attention("scored", **_LONG, softcap="20.0", softmax="learnable", dims="128/128", dbias="no"),
    *_attention("dropped", **_LONG, dropout="0.1", dims="128/128"),
    *_attention(
        "ragged", layout="thd", lengths="1000+1048", mask="padding_causal", heads="32/8", dtype="bf16", dims="128/128",
        dbias="no",
    ),
    region(
        "attention_fwd.paged", page="64", kv_lengths="absent", shape="2x1x1024", heads="32/8",
        dtype="bf16", dims="128/128",
    ),
)  # fmt: skip

_PRODUCT, _GROUPS = "2048x1024x1024", {"rows": "2048+2048+2048+2048", "columns": "1024x1024"}
_OCP, _FNUZ = "e4m3fn+e4m3fn e5m2+e4m3fn", "e4m3fnuz+e4m3fnuz e5m2fnuz+e4m3fnuz"


def _records(scaling: str, **axes: str) -> Region:
    return region("gemm.quantized", shape=_PRODUCT, scaling=scaling, **axes)


_GEMM = (
    region("gemm.plain", shape=_PRODUCT, dtype="bf16 fp16 fp32", layout="NT NN TN"),
    region("gemm.plain", shape="257x131x129"),
    region("gemm.epilogue", shape=_PRODUCT, layout="TN", epilogue="bgrad_a", out="added", out_dtype="fp32"),
    region("gemm.epilogue", shape=_PRODUCT, epilogue="gelu", bias="same", cast="both-delayed"),
    region("gemm.epilogue", shape=_PRODUCT, epilogue="dgelu"),
    _records("current+current", encodings=f"{_OCP} {_FNUZ}", layout="NT", accumulation="fast"),
    _records("current+current", encodings=f"{_OCP} {_FNUZ}", layout="TN", accumulation="split"),
    _records("block_1d+block_2d", encodings="e4m3fn+e4m3fn e4m3fnuz+e4m3fnuz", layout="NT"),
    _records("block_1d+block_1d", encodings="e5m2+e4m3fn", layout="TN"),
    _records("mxfp8+mxfp8", layout="NT TN"),
    _records("nvfp4+nvfp4", layout="NT"),
    region("grouped_gemm.plain", **_GROUPS),
    region("grouped_gemm.plain", **_GROUPS, layout="TN", splits="device"),
    region("grouped_gemm.quantized", **_GROUPS, cast="current"),
)

_NORM = (
    *(region(f"{name}_fwd.plain", shape=_LAYER, dtype="bf16 fp32") for name in ("layernorm", "rmsnorm")),
    *_cast("layernorm_fwd.residual", shape=_LAYER),
    region("rmsnorm_fwd.residual", shape=_LAYER, dtype="bf16 fp32"),
    region("layernorm_fwd.residual", shape="64x65536"),
    *(
        region(f"{name}_bwd.plain", shape=f"8192x512 {_LAYER} 64x65536", add="none same")
        for name in ("layernorm", "rmsnorm")
    ),
)

_POSITION = (
    region("rope_fwd.dense", shape="256x4x32x128", interleaved="no yes"),
    region("rope_bwd.dense", shape="256x4x32x128", interleaved="no yes"),
    region("rope_fwd.dense", shape="256x4x32x128", rotated="half", offsets="yes"),
    region("rope_fwd.thd", lengths="100+156", heads="32x128", dtype="fp32"),
)

_HALF = {"dtype": "bf16", "shape": _LAYER}
_QUANTIZE = (
    region("quantize.delayed", **_HALF, encoding=_FP8, usage="row both"),
    region("quantize.delayed", **_HALF, encoding=_FP8, usage="both", common="yes"),
    region("quantize.delayed", shape=_LAYER, dtype="fp16 fp32", usage="column"),
    region("quantize.delayed", dtype="bf16", shape="1031x1037", usage="both"),
    region("quantize.current", **_HALF, usage="row both", power_of_two="no yes"),
    region("quantize.current", **_HALF)._replace(sliced=True),
    region("quantize.block", **_HALF, cast="block_1d block_2d", usage="row column both"),
    region("quantize.block", dtype="bf16", shape="8190x4096", cast="block_1d block_2d", usage="both"),
    region("quantize.block", shape=_LAYER, encoding="e4m3fnuz e5m2", power_of_two="no"),
    region("quantize.mxfp8", **_HALF, usage="row column both"),
    region("quantize.mxfp8", dtype="bf16", shape="1031x1037", encoding="e4m3fnuz e5m2", common="yes"),
    region("quantize.nvfp4", **_HALF, usage="row column both"),
    region("quantize.nvfp4", **_HALF, cast="nvfp4_2d", usage="both"),
    *(region(f"quantize.{kind}", **_HALF, out="flag_clear") for kind in ("delayed", "current")),
    region("quantize_dbias.plain", **_HALF, cast="delayed", encoding="e5m2", bias_dtype="bf16 fp32"),
    region("quantize_dbias.plain", **_HALF, cast="block_1d mxfp8", bias_dtype="bf16 fp32"),
    region("compute_amax.plain", shape=_LAYER, dtype="bf16 fp16 fp32"),
    region("update_delayed_scales.plain", histories="several one", algorithm="max most_recent"),
)

_RECORDS = "block_1d block_2d mxfp8 nvfp4"
_READ = {"shape": "512x1024"}
_FORMS = (
    region("dequantize.plain", **_READ, encoding=_FP8, usage="row"),
    region("dequantize.plain", **_READ, usage="column"),
    region("dequantize.plain", **_READ, scaling=_RECORDS, usage="row column", dtype="fp32"),
    region("dequantize.plain", **_READ, scaling=_RECORDS, usage="row", layout="other"),
    region("relayout_scales.plain", **_READ, scaling=_RECORDS),
    region("transpose_quantized.plain", **_READ, scaling="tensor block_2d", usage="row"),
    region("transpose_quantized.plain", shape="512x1025", usage="row"),
    region("convert_encoding.plain", **_READ, scaling="block_1d", encoding="e4m3fn e5m2fnuz", count="0"),
    region("pad_rows.plain", k="4096", dtype="uint8 bf16 fp32"),
    *(
        region(f"{name}.plain", shard="middle in_row beyond", block="0 128", dtype="bf16 fp32", **axes)
        for name, axes in (("partial_amax", {}), ("partial_cast", {"encoding": "e4m3fn e5m2fnuz"}))
    ),
    *(
        region(f"{name}.plain", cast=f"delayed {_CASTS}", usage="both", dtype="bf16", **axes)
        for name, axes in (
            ("split_quantize", {"splits": "1024+512+512", "k": "4096"}),
            ("multi_tensor_quantize", {"shapes": "mixed"}),
        )
    ),
)

_LOGITS = "2x4x64x128 2x4x64x2048 2x4x64x8192 2x4x64x16384 2x4x64x40000"
_SOFTMAX = (
    *(region(f"softmax_{way}.plain", dtype="bf16", shape=_LOGITS, scale="0.125") for way in ("fwd", "bwd")),
    region("softmax_fwd.plain", dtype="fp16", shape="2x4x64x2048 2x4x64x40000", mask="random"),
    region("softmax_fwd.plain", dtype="fp32", shape="2x4x64x2048 2x4x64x40000", causal="yes"),
)

_ROUTED = {"shape": "8192x4096 8192x32", "top_k": "2", "experts": "60"}
_LISTS = "4096x4096+4096"
_STEP = {"shapes": _LISTS, "noop": "0"}
_TRAINING = (
    region("dropout_add_fwd.dropped", shape=_LAYER, dtype="bf16 fp32", bias="fp32 bf16"),
    region("dropout_add_bwd.plain", shape=_LAYER, dtype="bf16 fp32"),
    region("dropout_add_fwd.plain", shape="8192x100", dtype="fp16", residual="no", bias="fp32 bf16"),
    region("multi_tensor_adam.plain", **_STEP, dtype="bf16", grads="bf16", master="yes", adam_w="yes"),
    region("multi_tensor_adam.plain", **_STEP),
    region("multi_tensor_l2norm.plain", shapes=f"{_LISTS} 7*40", dtype="bf16 fp32", per_tensor="no yes"),
    region("multi_tensor_scale.plain", shapes=f"{_LISTS} 7*40", dtype="bf16 fp32", noop="0"),
    region("moe_permute.plain", **_ROUTED, dtype="bf16", probs="fp32", index="int32 int64"),
    region("moe_unpermute.plain", **_ROUTED, dtype="bf16", probs="fp32"),
    region("moe_unpermute_bwd.plain", **_ROUTED, dtype="bf16", grads="bf16", probs="fp32"),
    region("moe_unpermute.plain", **_ROUTED, dtype="fp16", probs="bf16"),
    region("moe_unpermute_bwd.plain", **_ROUTED, dtype="fp16", grads="bf16", probs="bf16"),
    region("moe_unpermute.plain", shape="8192x4096", top_k="12", experts="60", dtype="fp16"),
)

#: Family, under whose name they are compiled -> regions.
FAMILIES: dict[str, tuple[Region, ...]] = {
    "activation": _ACTIVATION, "attention": _ATTENTION, "gemm": _GEMM, "norm": _NORM, "position": _POSITION,
    "quantize": _QUANTIZE, "quantize_forms": _FORMS, "softmax": _SOFTMAX, "training": _TRAINING,
}  # fmt: skip
