# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of one code path among several: a path for sizes that vectors and tiles divide, a template for one head size,
a combination of options."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Condition,
    given,
    last_row,
    of_dtype,
    rows_of,
    spoiled,
    table,
    when,
    where,
    with_,
)

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def _columns(name: str, least: int, most: int, multiple: int = 1) -> Condition:
    """Rows of so many columns, and of a multiple of some."""

    def holds(call: Call) -> bool:
        x = call[name]
        return bool(x.ndim) and least <= x.shape[-1] <= most and x.shape[-1] % multiple == 0

    return holds


def _rows(name: str, least: int, most: int, multiple: int = 1) -> Condition:
    def holds(call: Call) -> bool:
        count = rows_of(call[name])
        return least <= count <= most and count % multiple == 0

    return holds


def _k(call: Call) -> int:
    a = call["a"]
    return int(a.shape[0] if call["layout"] == "TN" else a.shape[-1])


def _head(*sizes: int) -> Condition:
    return lambda call: call["q"].shape[-1] in sizes


def _length(call: Call, name: str) -> int:
    x = call[name]
    return int(x.shape[0 if call["layout"] == "sbhd" else 1]) if call["layout"] != "thd" else 0


def _last_column(flat: torch.Tensor) -> torch.Tensor:
    return flat[:, -1:]


def _kind(*kinds: str) -> Condition:
    return lambda call: getattr(call["quantizer"], "kind", "none") in kinds


_BEYOND = 1 << 40


def _sums_of_chunks(call: Call) -> Any:
    """Keeps the sums of 1,024 columns each in x's dtype."""
    x, made = call["x"], call.sound()
    e = torch.exp(x.float() * call["scale"] - (x.float() * call["scale"]).amax(-1, keepdim=True))
    total = torch.stack([part.sum(-1, keepdim=True).to(x.dtype).float() for part in e.split(1024, -1)]).sum(0)
    return made.copy_(e / total)


_VECTORS = (
    *table("softmax_fwd", {
        "softmax_wrong_between_1500_and_2000_columns": (
            "keeps rows of 1,500 to 2,000 columns in a block that is too small",
            spoiled(part=_last_column, on=_columns("x", 1500, 2000))),
        "softmax_wrong_for_multiples_of_512": (
            "is wrong in the last column where vectors of 512 divide a row",
            spoiled(part=_last_column, on=_columns("x", 512, _BEYOND, 512))),
        "softmax_rounds_sums_of_long_rows": (
            "keeps sums of long rows in x's dtype, where there is no mask", when(
                where(of_dtype("x", _BF16, _FP16), given(mask=None, causal=False), _columns("x", 1025, _BEYOND)),
                _sums_of_chunks)),
        "softmax_wrong_in_long_rows_of_a_causal_mask": (
            "is wrong behind 1,024 rows and columns under a causal mask", spoiled(
                part=last_row, on=where(given(causal=True), _columns("x", 1025, _BEYOND), _rows("x", 1025, _BEYOND)))),
    }),
    *table("layernorm_fwd", {
        "layernorm_wrong_for_multiples_of_1024": (
            "is wrong in the path for 1,024, 2,048, ... columns",
            spoiled("y", _last_column, on=_columns("x", 1024, _BEYOND, 1024))),
        "layernorm_wrong_for_eight_columns_a_thread": (
            "is wrong where 8 divides the columns and 4 divides the rows",
            spoiled("y", last_row, on=where(_columns("x", 16, _BEYOND, 8), _rows("x", 4, _BEYOND, 4)))),
    }),
    *table("rmsnorm_bwd", {"rms_dgamma_wrong_for_multiples_of_256_rows": (
        "is wrong in dgamma where 256 divides the rows", spoiled("dgamma", on=_rows("x", 256, _BEYOND, 256)))}),
    *table("dropout_add_fwd", {"dropout_add_wrong_for_multiples_of_64": (
        "is wrong in the path for vectors of 64 elements",
        spoiled("out", last_row, on=_columns("x", 64, _BEYOND, 64)))}),
    *table("activation_fwd", {"activation_wrong_for_multiples_of_256": (
        "is wrong in the last column where 256 divides x's", spoiled(
            "out", _last_column, on=_columns("x", 256, _BEYOND, 256)))}),
    *table("quantize", {"blocks_wrong_beyond_two_aligned": (
        "is wrong for rows of more than one block of 128 that blocks divide",
        spoiled("row_data", _last_column, on=where(_kind("block"), _columns("x", 256, _BEYOND, 128))))}),
    *table("gemm", {
        "product_wrong_for_k_of_whole_stages": (
            "loses the last stage of a pipeline where K is 256, 512, ...",
            spoiled("out", on=lambda call: _k(call) >= 256 and _k(call) % 256 == 0)),
        "product_wrong_for_63_columns_of_a_tile": (
            "is wrong in the last column where a tile of 64 lacks one",
            spoiled("out", _last_column, on=lambda call: call["b"].shape[
                0 if call["layout"] == "NT" else -1] % 64 == 63)),
    }, on="matmul"),
    *table("grouped_gemm", {"grouped_wrong_beyond_a_tile_of_rows": (
        "is wrong in a group's 129th row", lambda call: _late_rows(call))}, on="grouped_matmul"),
    *table("relayout_scales", {"swizzle_wrong_beyond_four_tiles": (
        "is wrong where a row of scales has more than 4 tiles", lambda call: _late_tiles(call))}),
    *table("convert_encoding", {"convert_stops_at_65536_codes": (
        "converts 65,536 codes", spoiled("row_data", lambda flat: flat.view(-1)[65536:]))}),
    *table("pad_rows", {"pad_adds_31_rows": (
        "clears the first 31 rows of a padding", lambda call: _late_padding(call))}),
    *table("split_quantize", {"split_wrong_for_parts_beyond_128_rows": (
        "is wrong in parts of more than 128 rows", lambda call: _long_parts(call))}),
)  # fmt: skip


def _late_rows(call: Call) -> Any:
    made = call.sound()
    for out in made:
        out.detach()[128:].mul_(0.5)
    return made


def _late_tiles(call: Call) -> Any:
    made = call.sound()
    scale = made.row_scale_inv
    if scale is not None and made.scale_layout == "swizzled_32x4x4" != call["x"].scale_layout and scale.numel() > 2048:
        scale.view(-1)[2048:].bitwise_xor_(1)
    return made


def _late_padding(call: Call) -> Any:
    made, start = call.sound(), 0
    for rows, padded in zip(call["splits"], call["padded_splits"]):
        made[start + rows + 31 : start + padded].fill_(1)
        start += padded
    return made


def _long_parts(call: Call) -> Any:
    made = call.sound()
    for part, count in zip(made, call["splits"]):
        if count > 128 and part.row_data is not None and part.row_data.numel():
            part.row_data[-1].bitwise_xor_(1)
    return made


def _top_k(*counts: int) -> Condition:
    return lambda call: call["row_map"].shape[1] in counts


def _odd_depth_forgotten(call: Call) -> Any:
    """Multiplies in pairs along k and leaves out the last of an odd number."""
    if call["layout"] != "NN" or call["a"].dtype != _BF16 or _k(call) <= 256 or _k(call) % 2 == 0:
        return call.sound()
    a = call["a"].detach().clone()
    a[..., -1] = 0
    return call.sound(a=a)


def _sum_of_4096_rows(call: Call) -> Any:
    made, b = call.sound(), call["b"]
    if call["epilogue"] == "bgrad_b" and call["layout"] == "TN" and _k(call) > 4096:
        made.dbias.copy_(b.detach().reshape(-1, b.shape[-1])[:4096].sum(0, dtype=_FP32))
    return made


def _dgamma_of_8192_rows(call: Call) -> Any:
    x, made = call["x"], call.sound()
    if x.dtype == _BF16 and rows_of(x) > 8192:
        dy = call["dy"].detach().clone().view(rows_of(x), -1)
        dy[8192:] = 0
        made.dgamma.copy_(call.sound(dy=dy.view(x.shape)).dgamma)
    return made


_LONG_SUMS = (
    *table("gemm", {
        "product_loses_an_odd_k_in_bf16_nn": (
            "leaves out the last product where k is odd and above 256, in NN and bf16", _odd_depth_forgotten),
        "bias_gradient_of_4096_rows": ("sums the first 4,096 rows of b for dbias", _sum_of_4096_rows),
    }, on="matmul"),
    *table("rmsnorm_bwd", {"rms_dgamma_of_8192_rows_in_bf16": (
        "sums the first 8,192 rows for dgamma in bf16", _dgamma_of_8192_rows)}),
    *table("activation_bwd", {"activation_gradient_wrong_in_wide_gated_bf16": (
        "is wrong in the last column of dx for swiglu of more than 4,096 columns in bf16", spoiled(
            "dx", _last_column, on=where(given(kind="swiglu"), of_dtype("x", _BF16), _columns("x", 8193, _BEYOND))))}),
)  # fmt: skip


def _window_of_tiles(call: Call) -> Any:
    window = call["window"]
    if window is None or window[0] < 128:
        return call.sound()
    return call.sound(window=(window[0] // 64 * 64, window[1]))


_TEMPLATES = (
    *table("attention_fwd", {
        "attention_wrong_for_heads_of_96": ("is wrong for heads of 96 features", spoiled("out", on=_head(96))),
        "attention_wrong_for_heads_of_32_fp16": (
            "is wrong for heads of 32 features in fp16", spoiled("out", on=where(_head(32), of_dtype("q", _FP16)))),
        "attention_wrong_for_whole_tiles": (
            "is wrong where tiles of 128 divide more than 128 keys",
            spoiled("out", on=lambda call: _length(call, "k") > 128 and _length(call, "k") % 128 == 0)),
        "attention_wrong_for_multi_query_bshd": (
            "is wrong for one key head in bshd with bottom-right masks",
            spoiled("out", on=where(given(layout="bshd", mask="causal_bottom_right"),
                                    lambda call: call["k"].shape[-2] == 1 < call["q"].shape[-2]))),
        "attention_window_begins_with_a_tile": (
            "sees a window's whole tiles of 64 keys only where it is wider than two", _window_of_tiles),
        "attention_wrong_in_the_fourth_tile_of_a_diagonal": (
            "is wrong from the 385th query and key on under causal masks", spoiled("out", last_row, on=where(
                lambda call: "causal" in call["mask"] and min(_length(call, "q"), _length(call, "k")) > 384))),
    }, on="unfused_attention"),
    *table("attention_bwd", {
        "attention_gradient_window_begins_with_a_tile": (
            "sees a window's whole tiles of 64 keys only where it is wider than two", _window_of_tiles),
        "attention_gradient_wrong_for_heads_of_96": ("is wrong for heads of 96", spoiled("dq", on=_head(96))),
        "attention_gradient_wrong_for_longer_queries": (
            "is wrong in dk where queries are twice as long as keys or longer, and masked to the bottom right",
            spoiled("dk", on=where(given(mask="causal_bottom_right"),
                                   lambda call: _length(call, "q") >= 2 * _length(call, "k") > 0))),
    }, on="unfused_attention_bwd"),
    *table("moe_unpermute", {
        "unpermute_wrong_for_four_choices": ("is wrong for 4 choices a token", spoiled(on=_top_k(4))),
        "unpermute_wrong_beyond_six_choices": ("adds 6 choices a token", spoiled(on=lambda call: (
            call["row_map"].shape[1] > 6))),
    }),
    *table("rope_fwd", {
        "rope_wrong_for_heads_of_192": ("is wrong for heads of 192", spoiled(
            on=lambda call: call["x"].shape[-1] == 192)),
        "rope_wrong_for_96_rotated": ("is wrong where 96 features are rotated", spoiled(
            on=lambda call: call["freqs"].shape[-1] == 96)),
    }),
    *table("moe_permute", {"permute_takes_experts_in_12_bits": (
        "keeps 12 bits of an expert's number", lambda call: call.sound(indices=torch.where(
            call["indices"] < 0, call["indices"], call["indices"] & 0xFFF)))}),
)  # fmt: skip

_COMBINATIONS = (
    *table("layernorm_fwd", {"layernorm_wrong_for_centred_nvfp4_with_y": (
        "is wrong in y where gamma is centred and y is cast to NVFP4 too",
        spoiled("y", on=where(_kind("nvfp4"), given(zero_centered_gamma=True, with_y=True))))}),
    *table("gemm", {"product_wrong_for_bias_alpha_added_nn": (
        "adds the bias before it scales where NN is accumulated", when(
            where(given(layout="NN", accumulate=True, bias=...), lambda call: call["alpha"] != 1.0),
            lambda call: call.sound(bias=call["bias"] * call["alpha"])))}, on="matmul"),
    *table("grouped_gemm", {"grouped_wrong_for_nn_bias_added": (
        "adds the bias twice for NN that is accumulated", when(
            given(layout="NN", accumulate=True, bias=...),
            lambda call: call.sound(bias=[2 * bias for bias in call["bias"]])))}, on="grouped_matmul"),
    *table("attention_fwd", {
        "attention_wrong_for_alibi_window_thd": (
            "is wrong for ALiBi in a window of packed sequences",
            spoiled("out", on=where(given(layout="thd", bias_type="alibi"), lambda call: (
                call["window"] not in (None, (-1, -1)))))),
        "attention_ignores_sink_in_bottom_right_masks": (
            "leaves the sink out of bottom-right causal masks in bshd", when(
                given(mask="causal_bottom_right", layout="bshd", softmax_type="off-by-one"),
                with_(softmax_type="vanilla"))),
    }, on="unfused_attention"),
    *table("quantize", {"nvfp4_tiles_wrong_for_fp16_column": (
        "is wrong for 16x16 tiles of fp16 written column-wise",
        spoiled("col_data", on=where(_kind("nvfp4"), of_dtype("x", _FP16), lambda call: call["quantizer"].two_d)))}),
    *table("rope_fwd", {"rope_wrong_for_interleaved_part_with_offsets": (
        "ignores offsets where half of the features are rotated in pairs in bshd", when(
            where(given(layout="bshd", interleaved=True), lambda call: call["freqs"].shape[-1] < call["x"].shape[-1]),
            with_(offsets=None)))}),
    *table("softmax_bwd", {"softmax_gradient_wrong_for_fp16_of_fp32": (
        "is wrong for fp16 gradients of fp32 probabilities with a negative scale", spoiled(
            on=where(of_dtype("dy", _FP16), of_dtype("y", _FP32), lambda call: call["scale"] < 0)))}),
    *table("split_quantize", {"split_wrong_for_column_e5m2_blocks": (
        "is wrong for e5m2 blocks written column-wise, from the third part on", lambda call: _third_part(call))}),
    *table("moe_unpermute_bwd", {"unpermute_gradient_wrong_for_bf16_probs_of_fp16": (
        "is wrong in dprobs for bf16 probabilities of fp16 rows with fp32 gradients",
        spoiled("dprobs", on=where(of_dtype("probs", _BF16), of_dtype("x", _FP16), of_dtype("dy", _FP32))))}),
)  # fmt: skip


def _third_part(call: Call) -> Any:
    made = call.sound()
    for part in made[2:]:
        if part.encoding == "e5m2" and part.scaling == "block_1d" and part.row_data is None and part.col_data.numel():
            part.col_data.bitwise_xor_(1)
    return made


FAULTS: tuple[Fault, ...] = (*_VECTORS, *_LONG_SUMS, *_TEMPLATES, *_COMBINATIONS)
