# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the twentieth set: written from the contracts alone, two for an operator on average."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    as_dense,
    expanded,
    operand,
    rows_of,
    table,
    with_members,
    without_graph,
)
from te_dispatch_torch import four_over_six, scores
from te_dispatch_torch.quantize import quantize
from te_dispatch_torch.state import compute_amax

_HALVES = (torch.bfloat16, torch.float16)


def _kind(quantizer: Any) -> str:
    return getattr(quantizer, "kind", "")


def _swapped_leading(x: torch.Tensor | None) -> bool:
    """Three dimensions, of which the first two lie in memory in the other order."""
    if x is None or x.ndim != 3 or min(x.shape) < 2 or expanded(x):
        return False
    return x.stride(-1) == 1 and x.stride(0) < x.stride(1)


# Casts.

#: Elements whose amax one launch finds: 256 blocks of 1024.
_LAUNCH = 256 * 1024


@without_graph
def _amax_of_one_launch(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if _kind(call["quantizer"]) != "current" or call["amax"] is not None or x.numel() <= _LAUNCH:
        return made
    return call.sound(amax=compute_amax(x.reshape(-1)[:_LAUNCH]))


@without_graph
def _last_block_moved_back(call: Call) -> Any:
    """The last block of rows is the last 32 rows, so that it is whole."""
    made, x = call.sound(), call["x"]
    if _kind(call["quantizer"]) != "mxfp8" or call["usage"] == "row":
        return made
    rows = rows_of(x)
    left = rows % 32
    if rows < 32 or not left or call["noop_flag"] is not None or call["rng_state"] is not None:
        return made
    last = quantize(x.reshape(rows, x.shape[-1])[rows - 32 :], call["quantizer"], usage="column")
    made.col_data[rows - left :].copy_(last.col_data[32 - left :])
    made.col_scale_inv[-1:].copy_(last.col_scale_inv)
    return made


def _ties_to_four(call: Call) -> Any:
    if _kind(call["quantizer"]) != "nvfp4_4over6":
        return call.sound()
    candidate = four_over_six._candidate

    def exchanged(scaled: torch.Tensor, wanted: torch.Tensor, quantizer: Any) -> Any:
        codes, block, error = candidate(scaled, wanted, quantizer)
        # Of the same errors that of 4 is to be the smaller one: it is called second.
        calls.append(error)
        return codes, block, error if len(calls) % 2 else torch.where(error == calls[-2], -1.0, error)

    calls: list[torch.Tensor] = []
    with swapped(("four_over_six", "_candidate", exchanged)):
        return call.sound()


@without_graph
def _tiles_down_columns(call: Call) -> Any:
    made = call.sound()
    if made.scale_layout != "swizzled_32x4x4" or call["x"].scale_layout == made.scale_layout:
        return made
    for scale in (made.row_scale_inv, made.col_scale_inv):
        if scale is not None and scale.numel():
            tiles = scale.reshape(scale.shape[0] // 128, scale.shape[1] // 4, 512)
            scale.copy_(tiles.transpose(0, 1).reshape(scale.shape).clone())
    return made


@without_graph
def _scales_of_the_first_launch(call: Call) -> Any:
    """A launch takes 32 tensors, and where the second one writes its scales is not moved on."""
    made = call.sound()
    if _kind(call["quantizers"][0]) != "current" or len(made) <= 32:
        return made
    scales = [(x.row_scale_inv if x.row_scale_inv is not None else x.col_scale_inv).clone() for x in made]
    for i in range(32, len(made)):
        for scale in (made[i].row_scale_inv, made[i].col_scale_inv):
            if scale is not None:
                scale.copy_(scales[i - 32])
    return made


def _empty_parts_last(call: Call) -> Any:
    """Parts without rows are no part of the launch; their padding is what is left at the end."""
    made, splits, padded = call.sound(), call["splits"], call["padded_splits"]
    order = sorted(range(len(splits)), key=lambda i: not splits[i])
    if order == list(range(len(splits))):
        return made
    return call.sound(splits=[splits[i] for i in order], padded_splits=[padded[i] for i in order])


# Products.


@without_graph
def _tokens_in_memory_order(call: Call) -> Any:
    """Leading dimensions are flattened as they lie in memory."""
    b = operand(call, "b")
    if call["layout"] != "TN" or b is None or not _swapped_leading(b):
        return call.sound()
    return call.sound(b=as_dense(b.detach()))


@without_graph
def _scale_of_the_block_before(call: Call) -> Any:
    b = call["b"]
    blocked = isinstance(b, Quantized) and (b.scaling, b.scale_layout) == ("block_1d", "canonical")
    if call["layout"] != "TN" or not blocked or not isinstance(b.col_scale_inv, torch.Tensor):
        return call.sound()
    scale = b.col_scale_inv.clone()
    if scale.ndim != 2 or scale.shape[1] < 2 or not b.rows() % 128:
        return call.sound()
    scale[:, -1] = scale[:, -2]
    return call.sound(b=with_members(b, col_scale_inv=scale))


# Norms.


def _normalized(call: Call, made: Any) -> torch.Tensor:
    """What was normalized, in fp32."""
    return (call["x"] if made.residual_out is None else made.residual_out).detach().float()


def _factor(call: Call) -> torch.Tensor:
    return call["gamma"].detach().float() + (1.0 if call["zero_centered_gamma"] else 0.0)


@without_graph
def _variance_in_one_pass(call: Call) -> Any:
    made, n = call.sound(), call["x"].shape[-1]
    if n < 2048 or made.y is None or made.y_quantized is not None:
        return made
    x = _normalized(call, made)
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0.0)
    rstd = torch.rsqrt(variance + call["eps"])
    y = (x - mean) * rstd * _factor(call)
    made.y.copy_(y if call["beta"] is None else y + call["beta"].detach().float())
    made.rstd.copy_(rstd.squeeze(-1))
    return made


@without_graph
def _statistics_in_memory_order(call: Call) -> Any:
    made = call.sound()
    if _swapped_leading(call["x"]):
        for found in (made.mean, made.rstd):
            found.copy_(found.t().reshape(found.shape).clone())
    return made


# Activations, softmax, rotary embedding.


@without_graph
def _overlapping_rows_twice(call: Call) -> Any:
    """The last 32 rows are a whole tile, some of whose rows the tile before it has summed."""
    made, dy = call.sound(), call["dy"]
    if made.dbias is None:
        return made
    dx = call.sound(dy=dy.detach().float(), quantizer=None, with_dbias=False).dx
    dx = dx.reshape(rows_of(dx), dx.shape[-1])
    rows = dx.shape[0]
    if rows > 32 and rows % 32:
        made.dbias.copy_(dx.sum(0) + dx[rows - 32 : rows - rows % 32].sum(0))
    return made


def _no_offsets_in_thd(call: Call) -> Any:
    made = call.sound()
    return call.sound(offsets=None) if call["layout"] == "thd" and call["offsets"] is not None else made


# Attention.


def _diagonal_of_the_longest(call: Call) -> Any:
    def offset(spec: Any, s_q: int, s_kv: int, len_q: Any, len_kv: Any) -> int:
        return s_kv - s_q if spec.bottom_right else 0

    with swapped(("scores", "_offset", offset)):
        return call.sound()


@without_graph
def _offset_gradient_without_dropout(call: Call) -> Any:
    made = call.sound()
    if made.dsoftmax_offset is not None and call["dropout_p"] > 0.0:
        whole = call.sound(dropout_p=0.0, rng_state=None, s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None)
        made.dsoftmax_offset.copy_(whole.dsoftmax_offset)
    return made


@without_graph
def _last_key_behind_the_end(call: Call) -> Any:
    """Indices of the last tile are clamped to the last key, and all of the tile is written."""
    made, bounds = call.sound(), call["cu_seqlens_kv"]
    if call["layout"] != "thd" or bounds is None or call["cu_seqlens_kv_padded"] is not None:
        return made
    end = int(bounds[-1])
    for grad in (made.dk, made.dv):
        if isinstance(grad, torch.Tensor) and 0 < end < grad.shape[0]:
            grad[end:] = grad[end - 1 : end].clone()
    return made


def _cap_of_biased(call: Call) -> Any:
    """Recomputes tanh from the final logits, which include the bias."""
    if not call["softcap"] or call["bias_type"] not in ("post_scale", "alibi"):
        return call.sound()
    sound = scores.scores_of

    def again(s: Any) -> Any:
        made = sound(s)
        return made._replace(capped=torch.where(made.z.isinf(), 0.0, made.z / s.softcap))

    with swapped(("attention_unfused", "scores_of", again)):
        return call.sound()


# Training.


@without_graph
def _flag_of_one(call: Call) -> Any:
    flag = operand(call, "noop_flag")
    if flag is None or flag.numel() != 1 or flag.dtype != torch.float32 or bool((flag == 0) | (flag == 1)):
        return call.sound()
    return call.sound(noop_flag=torch.zeros_like(flag))


def _all_as_the_first(call: Call) -> Any:
    made, xs = call.sound(), call["tensors"]
    dtype = xs[0].dtype
    if dtype not in _HALVES or all(x.dtype == dtype for x in xs):
        return made
    return call.sound(tensors=[x.detach().to(dtype) for x in xs])


def _experts_in_8_bits(call: Call) -> Any:
    made, indices = call.sound(), call["indices"]
    if not bool((indices > 255).any()):
        return made
    return call.sound(indices=torch.where(indices < 0, indices, indices & 0xFF))


FAULTS: tuple[Fault, ...] = (
    *table("quantize", {
        "current_amax_sees_one_launch": ("finds the amax of the first 262,144 elements", _amax_of_one_launch),
        "mxfp8_last_rows_make_a_whole_block": (
            "scales a partial last block of rows as the last 32 rows together", _last_block_moved_back),
        "four_over_six_ties_to_four": ("maps a block to 4 where both errors are the same", _ties_to_four),
    }),
    *table("relayout_scales", {"swizzled_tiles_lie_in_columns": (
        "writes tiles of scales in column-major order", _tiles_down_columns)}),
    *table("multi_tensor_quantize", {"scales_of_tensor_32_are_those_of_0": (
        "gives tensors from the 33rd on the scales of the first 32", _scales_of_the_first_launch)}),
    *table("pad_rows", {"padding_of_empty_parts_comes_last": (
        "puts the padding of parts without rows behind all others", _empty_parts_last)}),
    *table("gemm", {
        "weight_gradient_pairs_tokens_as_they_lie": (
            "flattens b's swapped leading dimensions in the order of memory", _tokens_in_memory_order),
    }, on="matmul"),
    *table("gemm", {"partial_block_has_the_scale_before": (
        "scales b's partial last block of 128 as the block before", _scale_of_the_block_before)}, on="emulated_gemm"),
    *table("layernorm_fwd", {
        "long_rows_have_a_one_pass_variance": (
            "takes the squares' mean less the mean's square from 2048 features on", _variance_in_one_pass),
        "layernorm_statistics_in_memory_order": (
            "writes mean and rstd in the order in which x's rows lie", _statistics_in_memory_order),
    }),
    *table("activation_bwd", {
        "overlapping_tiles_sum_twice": (
            "sums rows twice where the last tile of 32 overlaps the one before", _overlapping_rows_twice),
    }),
    *table("rope_bwd", {"rope_gradient_forgets_offsets_in_thd": (
        "starts sequences of layout thd at position 0", _no_offsets_in_thd)}),
    *table("attention_fwd", {
        "diagonal_ends_with_the_longest": (
            "ends the diagonal where the longest sequences end", _diagonal_of_the_longest),
    }, on="unfused_attention", also="faulty.unfused_attention_bwd"),
    *table("attention_bwd", {
        "sink_gradient_ignores_dropout": (
            "computes the gradient of the softmax's offset without dropout", _offset_gradient_without_dropout),
        "gradients_repeat_behind_the_last_sequence": (
            "writes the last key's gradient to the rows behind it", _last_key_behind_the_end),
        "cap_gradient_counts_the_bias": ("takes the cap's gradient at the biased logits", _cap_of_biased),
    }, on="unfused_attention_bwd"),
    *table("multi_tensor_adam", {
        "adam_heeds_a_flag_of_one": ("steps where the no-op flag is neither 0 nor 1", _flag_of_one),
    }),
    *table("multi_tensor_l2norm", {"norm_reads_all_as_the_first": (
        "rounds all tensors to the 16 bits of the first one", _all_as_the_first)}),
    *table("moe_permute", {"experts_sort_by_8_bits": ("sorts by the low 8 bits of an expert", _experts_in_8_bits)}),
    )  # fmt: skip
