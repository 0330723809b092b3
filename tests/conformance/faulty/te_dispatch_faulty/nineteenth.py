# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the nineteenth set (docs/certification.md), written from the contracts alone."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from te_dispatch.ops import alloc
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Memory,
    as_dense,
    misread,
    operand,
    remembering,
    table,
    transposed,
)

#: Bytes of a vector, columns of a norm's tile, the largest x with a finite e^x.
_VECTOR, _TILE, _LARGEST = 16, 512, 88.7
_HALVES = (torch.bfloat16, torch.float16)


def _spans(splits: Any) -> list[tuple[int, int]]:
    starts = [sum(splits[:i]) for i in range(len(splits))]
    return list(zip(starts, splits))


# Casts.


def _parts_from_boundaries(call: Call) -> Any:
    """Rounds the address at which a part starts down to a vector's."""
    made, x = call.sound(), call["x"].detach()
    if not x.is_contiguous() or not x.numel():
        return made
    k, flat, parts = x.shape[1], x.reshape(-1), []
    for start, rows in _spans(call["splits"]):
        before = start * k * x.element_size() % _VECTOR // x.element_size()
        parts.append(flat[start * k - before :][: rows * k].view(rows, k))
    return call.sound(x=torch.cat(parts))


def _table_of_process(call: Call, memory: Memory) -> Any:
    """Fills one table of pointers for all threads, and launches some time later."""
    xs = call["xs"]
    if not isinstance(xs, (list, tuple)) or len(xs) < 2 or not all(isinstance(x, torch.Tensor) for x in xs):
        return call.sound()
    memory.kept["table"] = xs
    time.sleep(0.0002)
    read = memory.kept.pop("table", xs)
    if [(x.shape, x.dtype) for x in read] != [(x.shape, x.dtype) for x in xs]:
        read = xs
    return call.sound(xs=read)


# Records in other forms, and the bookkeeping of scales.


def _one_nan_known(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.encoding == "e5m2":
        others = torch.tensor([0x7D, 0x7E, 0xFD, 0xFE], dtype=torch.uint8, device=x.device)
        for before, after in ((x.row_data, made.row_data), (x.col_data, made.col_data)):
            if before is not None and after is not None:
                after.copy_(torch.where(torch.isin(before, others), before, after))
    return made


def _subnormals_flushed(call: Call) -> Any:
    x = operand(call, "x")
    if x is None or x.dtype == torch.float16 or not x.is_floating_point():
        return call.sound()
    return call.sound(x=torch.where(x.detach().abs() < 2.0**-126, x.detach() * 0, x.detach()))


def _one_part_viewed(call: Call) -> Any:
    made = call.sound()
    return call["x"][: call["splits"][0]] if len(call["splits"]) == 1 else made


# Products.


def _overflows_before_alpha(call: Call) -> Any:
    made, a = call.sound(), operand(call, "a")
    if a is None or a.dtype != torch.float16 or not 0 < abs(call["alpha"]) < 1 or call["epilogue"] is not None:
        return made
    if not isinstance(made.out, torch.Tensor):
        return made
    plain = {"alpha": 1.0, "out": None, "accumulate": False, "bias": None, "out_dtype": torch.float16}
    product = call.sound(**plain).out
    infinite = (product.float() * call["alpha"]).to(made.out.dtype)
    made.out.copy_(torch.where(product.isinf(), infinite, made.out.detach()))
    return made


def _row_counted_once(call: Call) -> Any:
    made, b = call.sound(), operand(call, "b")
    rows_of_k = call["layout"][1] == "N" and call["epilogue"] == "bgrad_b"
    if b is not None and rows_of_k and b.ndim == 2 and b.shape[0] > 1 and b.stride(0) == 0:
        made.dbias.copy_(b.detach()[0])
    return made


# Attention.


def _rows_behind_left(call: Call) -> Any:
    made, bounds = call.sound(), call["cu_seqlens_q"]
    if call["layout"] != "thd" or call["cu_seqlens_q_padded"] is not None or not isinstance(made.out, torch.Tensor):
        return made
    end = int(bounds[-1])
    if end == made.out.shape[0]:
        return made
    out = alloc.empty("out", tuple(made.out.shape), made.out.dtype, made.out.device)
    out[:end] = made.out[:end]
    return made._replace(out=out)


# What works row by row.


def _tiles_weighed_alike(call: Call) -> Any:
    """The mean of the means of tiles, of which the last is partial."""
    made, n = call.sound(), call["x"].shape[-1]
    if n <= _TILE or n % _TILE == 0 or call["quantizer"] is not None or not made.y.numel():
        return made
    x = (call["x"] if made.residual_out is None else made.residual_out).detach().float()
    mean = torch.stack([tile.mean(-1) for tile in x.split(_TILE, -1)]).mean(0)
    centred = x - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(-1) + call["eps"])
    factor = call["gamma"].detach().float() + (1.0 if call["zero_centered_gamma"] else 0.0)
    shift = 0.0 if call["beta"] is None else call["beta"].detach().float()
    made.y.copy_(centred * rstd[..., None] * factor + shift)
    made.mean.copy_(mean)
    made.rstd.copy_(rstd)
    return made


def _weighed_in_fp16(call: Call) -> Any:
    made, dy = call.sound(), call["dy"]
    if dy.dtype != torch.float16:
        return made
    factor = call["gamma"].detach().float() + (1.0 if call["zero_centered_gamma"] else 0.0)
    weighed = (dy.detach().float() * factor).to(torch.float16)
    lost = weighed.isinf() & ~dy.isinf()
    if lost.any():
        made.dx.copy_(call.sound(dy=torch.where(lost, weighed, dy.detach())).dx)
    return made


def _dense_bounds(call: Call) -> Any:
    bounds = operand(call, "cu_seqlens")
    if bounds is None or bounds.ndim != 1 or bounds.stride(0) == 1:
        return call.sound()
    return call.sound(cu_seqlens=as_dense(bounds))


def _scaled_when_rounded(call: Call) -> Any:
    made = call.sound()
    return made if made.dtype not in _HALVES else made.copy_(call.sound(scale=1.0).float() * call["scale"])


# What else a step needs.


def _dropped(call: Call, made: Any, keep: torch.Tensor) -> torch.Tensor:
    x = call["x"].detach().float() + (0.0 if call["bias"] is None else call["bias"].detach().float())
    kept = torch.where(keep, x * (1.0 / (1.0 - call["dropout_p"])), 0.0)
    return kept if call["residual"] is None else kept + call["residual"].detach().float()


def _counted_from_the_offset(call: Call) -> Any:
    """Draws of one state are those of the state before, an element further."""
    made, state = call.sound(), call["rng_state"]
    if made.mask is None or not made.mask.numel():
        return made
    first = call.sound(rng_state=torch.stack((state[0], torch.zeros_like(state[1])))).mask
    keep = first.reshape(-1).roll(-(int(state[1]) % first.numel())).view(first.shape)
    made.mask.copy_(keep)
    made.out.copy_(_dropped(call, made, keep != 0))
    return made


def _empty_rows_scaled_by_one(call: Call) -> Any:
    made = call.sound()
    one = {"block_1d": 1.0, "mxfp8": 127, "nvfp4": 0x38}.get(getattr(made.permuted, "scaling", ""))
    if one is not None:
        empty = torch.ones(made.permuted.shape[0], dtype=torch.bool, device=made.row_map.device)
        empty[made.row_map[made.row_map >= 0].long()] = False
        made.permuted.row_scale_inv[empty] = one
    return made


def _rows_clamped(call: Call) -> Any:
    x, rows = operand(call, "x"), operand(call, "row_map")
    if x is None or rows is None or x.ndim != 2 or not x.shape[0] or rows.dtype != torch.int32:
        return call.sound()
    return call.sound(row_map=rows.clamp_max(x.shape[0] - 1))


def _dropped_choices_multiplied(call: Call) -> Any:
    made = call.sound()
    if made.dprobs is not None:
        finite = call["dy"].isfinite().all(-1, keepdim=True)
        made.dprobs.masked_fill_((call["row_map"] < 0) & ~finite, math.nan)
    return made


FAULTS: tuple[Fault, ...] = (
    *table("split_quantize", {
        "split_reads_parts_from_a_vector_on": (
            "reads parts from a multiple of 16 bytes on", _parts_from_boundaries),
    }),
    *table("multi_tensor_quantize", {
        "threads_share_a_table_of_casts": ("keeps the addresses of all threads in one table", remembering(
            _table_of_process)),
    }),
    *table("convert_encoding", {
        "conversion_knows_one_nan": ("keeps the codes of NaN but 7F and FF", _one_nan_known),
    }),
    *table("partial_cast", {
        "shard_cast_flushes_its_input": ("reads subnormal numbers as 0", _subnormals_flushed),
    }),
    *table("unpad_rows", {"unpadding_of_one_part_is_a_view": ("returns a view of x for one part", _one_part_viewed)}),
    *table("gemm", {
        "product_overflows_before_alpha": ("rounds fp16 products before it multiplies by alpha",
            _overflows_before_alpha),
        "bias_gradient_counts_an_expanded_row_once": (
            "counts the row of an expanded gradient once", _row_counted_once),
    }, on="matmul"),
    *table("attention_fwd", {
        "attention_leaves_rows_behind_the_last_sequence": (
            "does not write rows behind the last sequence", _rows_behind_left),
    }, on="unfused_attention"),
    *table("layernorm_fwd", {
        "layernorm_weighs_a_partial_tile_as_a_whole_one": (
            "averages the means of tiles, the partial one's too", _tiles_weighed_alike),
    }),
    *table("rmsnorm_bwd", {"rms_gradient_weighs_dy_in_fp16": ("multiplies dy by gamma in fp16", _weighed_in_fp16)}),
    *table("rope_fwd", {"rope_reads_gapped_bounds_as_dense": ("reads bounds as adjacent numbers", _dense_bounds)}),
    *table("softmax_bwd", {"softmax_gradient_scales_what_it_has_rounded": (
        "multiplies by the scale what it has rounded", _scaled_when_rounded)}),
    *table("dropout_add_fwd", {
        "dropout_counts_from_the_offset": ("draws for element i + 1 what the next offset draws for i",
            _counted_from_the_offset),
    }),
    *table("dropout_add_bwd", {"dropout_gradient_misreads_a_transposed_mask": (
        "reads a transposed mask as a dense one", misread("mask", transposed))}),
    *table("moe_permute", {
        "permute_gives_empty_rows_a_scale_of_one": (
            "gives rows that no choice fills scale 1", _empty_rows_scaled_by_one),
    }),
    *table("moe_unpermute", {
        "unpermute_clamps_rows_that_are_not_there": ("takes x's last row for those behind it", _rows_clamped),
    }),
    *table("moe_unpermute_bwd", {
        "dprobs_of_dropped_choices_multiply": (
            "multiplies dy by 0 for choices that are dropped", _dropped_choices_multiplied),
    }),
    *table("multi_tensor_l2norm", {
    }),
    )  # fmt: skip
