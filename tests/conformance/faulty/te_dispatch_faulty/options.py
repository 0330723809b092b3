# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that need several options at once, operands that are one tensor, and bad usage that is let through."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from te_dispatch.ops.results import Gemm
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    Condition,
    given,
    of_dtype,
    operand,
    spoiled,
    table,
    when,
    where,
    with_,
)

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _scaling(name: str, *kinds: str) -> Condition:
    return lambda call: getattr(call[name], "scaling", "none") in kinds


def _kind(*kinds: str) -> Condition:
    return lambda call: getattr(call["quantizer"], "kind", "none") in kinds


def _encoding(name: str, *encodings: str) -> Condition:
    return lambda call: getattr(call[name], "encoding", "none") in encodings


def _gaps(call: Call) -> bool:
    return call["layout"] == "thd" and call["cu_seqlens_q_padded"] is not None


def _grouped(call: Call) -> bool:
    return bool(call["q"].shape[-2] != call["k"].shape[-2])


def _window(call: Call) -> bool:
    return call["window"] not in (None, (-1, -1))


def _codes_off(call: Call) -> Any:
    """The column-wise copy has other codes."""
    made = call.sound()
    quantized = getattr(made, "out_quantized", None) or getattr(made, "y_quantized", None) or made
    data = getattr(quantized, "col_data", None)
    if isinstance(data, torch.Tensor) and data.numel():
        data.view(torch.uint8).bitwise_xor_(1)
    return made


def _without_gelu(call: Call) -> Any:
    aux = call.sound().aux  # first: it writes `out`, too
    return call.sound(epilogue=None, aux=None, aux_quantizer=None)._replace(aux=aux)


_PRODUCTS = (
    *table("gemm", {
        "gelu_skipped_for_tn_bias_fp32": (
            "skips GELU for TN with a bias and an fp32 result of bf16 operands",
            when(where(given(layout="TN", epilogue="gelu", bias=..., out_dtype=_FP32), of_dtype("a", _BF16)),
                 _without_gelu),
        ),
        "alpha_lost_for_nn_accumulated": (
            "ignores alpha for NN that is added to fp32", when(given(layout="NN", accumulate=True), with_(alpha=1.0))),
        "bias_lost_for_tn_fp16": ("adds no bias for TN in fp16",
                                  when(where(given(layout="TN"), of_dtype("a", _FP16)), with_(bias=None))),
        "wrong_for_nn_fp32_fp16_result": (
            "is wrong for NN of fp32 operands with an fp16 result",
            spoiled("out", on=where(given(layout="NN", out_dtype=_FP16), of_dtype("a", _FP32)))),
        "wrong_for_tn_leading_dimensions_bias": (
            "is wrong for TN with leading dimensions and a bias",
            spoiled("out", on=where(given(layout="TN", bias=...), lambda call: call["a"].ndim > 2))),
        "dgelu_sums_no_bias_gradient_for_nn": (
            "leaves the bias gradient of DGELU halved for NN in bf16",
            spoiled("dbias", on=where(given(layout="NN", epilogue="dgelu"), of_dtype("a", _BF16)))),
        "bgrad_wrong_for_tn_accumulated": (
            "halves the bias gradient where the product is accumulated",
            spoiled("dbias", on=given(epilogue=("bgrad_a", "bgrad_b"), accumulate=True))),
    }, on="matmul"),
    *table("gemm", {
        "fp8_wrong_for_tn_e5m2_accumulated": (
            "is wrong for TN of e5m2 that is accumulated",
            spoiled("out", on=where(given(layout="TN", accumulate=True), _encoding("a", "e5m2")))),
        "fp8_wrong_for_nn_with_bias_split": (
            "is wrong for NN with a bias and split accumulation",
            spoiled("out", on=given(layout="NN", bias=..., split_accumulator=True))),
        "mxfp8_wrong_for_nn": ("is wrong for NN of MXFP8",
                               spoiled("out", on=where(given(layout="NN"), _scaling("a", "mxfp8")))),
        "blocks_wrong_for_tn": ("is wrong for TN of 1x128 blocks",
                                spoiled("out", on=where(given(layout="TN"), _scaling("a", "block_1d")))),
        "nvfp4_wrong_with_alpha": ("is wrong for NVFP4 with an alpha",
                                   spoiled("out", on=where(_scaling("a", "nvfp4"), lambda call: call["alpha"] != 1))),
        "fp8_gelu_wrong_for_fp16": ("is wrong for GELU of FP8 operands with an fp16 result",
                                    spoiled("out", on=given(epilogue="gelu", out_dtype=_FP16))),
    }, on="emulated_gemm"),
)  # fmt: skip

_CASTS = (
    *table("activation_fwd", {
        "swiglu_wrong_for_mxfp8_both": (
            "is wrong in the column-wise copy of SwiGLU cast to MXFP8 both ways",
            when(where(given(kind="swiglu", usage="both"), _kind("mxfp8")), _codes_off)),
        "geglu_wrong_for_current_column": (
            "is wrong for GEGLU cast with current scaling, column-wise only",
            when(where(given(kind="geglu", usage="column"), _kind("current")), _codes_off)),
        "relu_wrong_for_quantized_input": (
            "is wrong for ReLU of a quantized operand",
            spoiled("out", on=lambda call: call["kind"] == "relu" and operand(call, "x") is None)),
        "clamped_swiglu_takes_default_limit_in_fp16": (
            "ignores the limit for fp16",
            when(where(given(kind="clamped_swiglu"), of_dtype("x", _FP16)), with_(params=None))),
        "srelu_wrong_with_both_results": (
            "is wrong for SReLU where the result is returned beside its cast",
            spoiled("out", on=where(given(kind="srelu", with_out=True), _kind("delayed", "current", "mxfp8")))),
    }),
    *table("activation_bwd", {
        "swiglu_gradient_wrong_with_dbias_and_cast": (
            "is wrong in the bias gradient of SwiGLU that is cast",
            spoiled("dbias", on=where(given(kind="swiglu"), lambda call: call["quantizer"] is not None))),
        "gelu_gradient_wrong_for_quantized_input_fp16": (
            "is wrong for GELU of a quantized operand with fp16 gradients",
            spoiled("dx", on=lambda call: (
                call["kind"] == "gelu" and operand(call, "x") is None and call["dy"].dtype == _FP16))),
    }),
    *table("layernorm_fwd", {
        "layernorm_wrong_for_residual_mxfp8": (
            "is wrong where x + residual is cast to MXFP8 both ways",
            when(where(given(residual=..., usage="both"), _kind("mxfp8")), _codes_off)),
        "layernorm_forgets_beta_for_fp32_weights_fp16": (
            "adds no beta where weights are fp32 and x is fp16",
            when(where(of_dtype("gamma", _FP32), of_dtype("x", _FP16), given(quantizer=None)),
                 lambda call: call.sound(beta=None))),
    }),
    *table("rmsnorm_fwd", {
        "rms_ignores_centring_for_fp32_weights": (
            "multiplies by gamma where 1 + gamma is asked and weights are fp32 beside fp16",
            when(where(of_dtype("gamma", _FP32), of_dtype("x", _FP16)), with_(zero_centered_gamma=False))),
        "rms_ignores_eps_with_residual_fp32": (
            "adds no eps to fp32 sums with a residual",
            when(where(given(residual=...), of_dtype("x", _FP32)), with_(eps=0.0))),
    }),
    *table("rmsnorm_bwd", {"rms_gradient_ignores_add_for_fp32_beside_bf16": (
        "ignores an fp32 `add` beside bf16 x",
        when(where(of_dtype("add", _FP32), of_dtype("x", _BF16)), with_(add=None)))}),
    *table("quantize", {
        "e5m2_column_wrong_with_noop_flag": (
            "is wrong for e5m2 written column-wise where a clear flag is given",
            when(where(given(usage="column", noop_flag=...), lambda call: call["quantizer"].encoding == "e5m2"),
                 _codes_off)),
        "current_power_of_two_wrong_for_fp16": (
            "rounds no scale to a power of two for fp16",
            when(where(_kind("current"), of_dtype("x", _FP16)), lambda call: _no_power_of_two(call))),
    }),
    *table("softmax_fwd", {
        "softmax_forgets_scale_with_mask_fp16": (
            "ignores the scale where fp16 is masked and causal",
            when(where(given(mask=..., causal=True), of_dtype("x", _FP16)), with_(scale=1.0))),
        "softmax_wrong_for_fp16_to_fp32_causal": (
            "is wrong for causal fp16 with an fp32 result",
            spoiled(on=where(given(causal=True, out_dtype=_FP32), of_dtype("x", _FP16)))),
    }),
    *table("rope_fwd", {"rope_ignores_offsets_interleaved_sbhd": (
        "ignores offsets for interleaved sbhd in fp16",
        when(where(given(layout="sbhd", interleaved=True), of_dtype("x", _FP16)), with_(offsets=None)))}),
    *table("dropout_add_fwd", {"dropout_forgets_bf16_bias_without_residual": (
        "adds no bf16 bias where nothing is added", when(
            where(of_dtype("bias", _BF16), given(residual=None)), with_(bias=None)))}),
    *table("multi_tensor_adam", {"adam_decays_masters_twice_without_correction": (
        "decays twice for master weights without bias correction",
        when(given(master=..., bias_correction=False, adam_w=True), lambda call: call.sound(
            weight_decay=2 * call["weight_decay"])))}),
    *table("moe_permute", {"permute_loses_probs_beyond_capacity_bf16": (
        "returns no bf16 probabilities where the capacity is limited",
        spoiled("probs", on=where(of_dtype("probs", _BF16), given(capacity=...))))}),
)  # fmt: skip


def _no_power_of_two(call: Call) -> Any:
    import dataclasses

    return call.sound(quantizer=dataclasses.replace(call["quantizer"], power_of_two=False))


_ATTENTION = (
    *table("attention_fwd", {
        "attention_wrong_for_gaps_and_window": (
            "is wrong for packed sequences with gaps and a window", spoiled("out", on=where(_gaps, _window))),
        "attention_wrong_for_capped_sink": (
            "is wrong for capped scores with a learnable sink",
            spoiled("out", on=where(given(softmax_type="learnable"), lambda call: call["softcap"] > 0))),
        "attention_wrong_for_grouped_alibi_sbhd": (
            "is wrong for ALiBi of grouped heads in sbhd",
            spoiled("out", on=where(given(layout="sbhd", bias_type="alibi"), _grouped))),
        "attention_wrong_for_grouped_bottom_right_fp16": (
            "is wrong for bottom-right masks of grouped heads in fp16",
            spoiled("out", on=where(given(mask="causal_bottom_right"), _grouped, of_dtype("q", _FP16)))),
        "attention_max_logit_wrong_for_thd_padding": (
            "is wrong in the largest logit of padded thd", spoiled("max_logit", on=given(layout="thd"))),
        "attention_wrong_for_paged_sbhd_causal": (
            "is wrong for pages in sbhd with a causal mask",
            spoiled("out", on=given(layout="sbhd", mask="causal", page_table=...))),
    }, on="unfused_attention"),
    *table("attention_bwd", {
        "attention_gradient_wrong_for_gaps_and_window": (
            "is wrong for packed sequences with gaps and a window", spoiled("dv", on=where(_gaps, _window))),
        "attention_gradient_wrong_for_grouped_bias": (
            "is wrong in dk for a bias and grouped heads",
            spoiled("dk", on=where(given(bias_type="post_scale"), _grouped))),
        "attention_gradient_wrong_for_capped_window": (
            "is wrong in dq for capped scores in a window",
            spoiled("dq", on=where(_window, lambda call: call["softcap"] > 0))),
        "attention_gradient_wrong_for_dropout_grouped_fp16": (
            "is wrong in dv for dropout of grouped heads in fp16",
            spoiled("dv", on=where(_grouped, of_dtype("q", _FP16), lambda call: call["dropout_p"] > 0))),
    }, on="unfused_attention_bwd"),
)  # fmt: skip


def _cast_with(name: str = "quantizer", **options: Any) -> Behaviour:
    """The quantizer has other options, where its kind has them."""

    def behave(call: Call) -> Any:
        quantizer = call[name]
        if not hasattr(quantizer, next(iter(options))):
            return call.sound()
        return call.sound(**{name: dataclasses.replace(quantizer, **options)})

    return behave


def _fused(operator: str, prefix: str, on: str = "", quantizer: str = "quantizer") -> tuple[Fault, ...]:
    return table(operator, {
        f"{prefix}_cast_has_no_floor": ("casts as if epsilon were 0", _cast_with(quantizer, epsilon=0.0)),
        f"{prefix}_cast_rounds_no_scale": (
            "rounds no scale to a power of two", _cast_with(quantizer, power_of_two=False)),
    }, on=on)  # fmt: skip


#: Casts that another operator ends with.
_FUSED = (
    *_fused("quantize_dbias", "dbias"), *_fused("activation_fwd", "activation"),
    *_fused("activation_bwd", "activation_gradient"), *_fused("layernorm_fwd", "layernorm"),
    *_fused("rmsnorm_fwd", "rms"), *_fused("gemm", "product", "matmul", "out_quantizer"),
    *_fused("attention_fwd", "attention", "unfused_attention", "out_quantizer"),
)  # fmt: skip


def _same(one: str, other: str, path: str) -> Behaviour:
    """Wrong where two operands are one tensor."""

    def same(call: Call) -> bool:
        a, b = operand(call, one), operand(call, other)
        return a is not None and b is not None and a.numel() > 0 and a.data_ptr() == b.data_ptr()

    return spoiled(path, on=same)


def _lenient(answer: Any) -> Behaviour:
    """Gives something where an error must come."""

    def behave(call: Call) -> Any:
        try:
            return call.sound()
        except (ValueError, TypeError):
            return answer(call)

    return behave


def _some_product(call: Call) -> Any:
    a, b = call["a"], call["b"]
    return Gemm(torch.zeros((a.shape[0], b.shape[0]), dtype=getattr(a, "dtype", _FP32)), None, None)


_USAGE = (
    *table("gemm", {
        "product_wrong_for_one_tensor_twice": ("is wrong where a is b", _same("a", "b", "out")),
        "product_accepts_anything": ("returns zeros where K differs or an option is unknown", _lenient(_some_product)),
    }, on="matmul"),
    *table("softmax_bwd", {"softmax_gradient_wrong_for_one_tensor_twice": (
        "is wrong where dy is y", _same("dy", "y", ""))}),
    *table("rmsnorm_bwd", {"rms_gradient_wrong_for_one_tensor_twice": (
        "is wrong where dy is x", _same("dy", "x", "dx"))}),
    *table("dropout_add_fwd", {"dropout_wrong_for_one_tensor_twice": (
        "is wrong where the residual is x", _same("x", "residual", "out"))}),
    *table("attention_fwd", {"attention_wrong_for_one_tensor_twice": (
        "is wrong where k is v", _same("k", "v", "out"))}, on="unfused_attention"),
    *table("activation_fwd", {"activation_accepts_any_kind": (
        "passes x on where the kind is unknown", _lenient(lambda call: call["x"].clone()))}),
    *table("softmax_fwd", {"softmax_accepts_any_mask": (
        "ignores a mask of a wrong shape", _lenient(lambda call: call.sound(mask=None)))}),
    *table("quantize", {"quantize_accepts_any_usage": (
        "casts row-wise where the usage is unknown", _lenient(lambda call: call.sound(usage="row")))}),
    *table("layernorm_fwd", {"layernorm_accepts_any_gamma": (
        "takes gamma for 1 where its shape is wrong", _lenient(lambda call: call.sound(
            gamma=torch.ones(call["x"].shape[-1]), beta=None)))}),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_PRODUCTS, *_CASTS, *_FUSED, *_ATTENTION, *_USAGE)
