# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults in corners of the contracts that the kit did not look into until a second adversary had read them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import changing, gapped, given, misread, operand, table, transposed, when, with_
from te_dispatch_torch.quantize import quantize
from te_dispatch_torch.state import compute_amax


def _cut_at_limit(call: Call) -> Any:
    made, x = call.sound(), operand(call, "x")
    if x is None or call["kind"] != "clamped_swiglu" or call["quantizer"] is not None:
        return made
    gate = x.chunk(2, -1)[0]
    gradient = made.dx[..., : gate.shape[-1]]
    gradient.copy_(torch.where(gate == (call["params"] or (7.0,))[0], 0.0, gradient))
    return made


def _without_amax(call: Call) -> Any:
    quantizer = call["aux_quantizer"]
    if quantizer is None or call["out_quantizer"] is None or getattr(quantizer, "amax", None) is None:
        return call.sound()
    return call.sound(aux_quantizer=dataclasses.replace(quantizer, amax=None))


def _summed_in_fp16(call: Call) -> Any:
    made, x, rows = call.sound(), call["x"], call["row_map"]
    if x.dtype != torch.float16 or call["probs"] is not None or not x.numel():
        return made
    total = torch.zeros_like(made)
    for choice in rows.unbind(1):
        total += torch.where((choice >= 0)[:, None], x[choice.clamp_min(0).long()], 0)
    return made.copy_(total)


def _as_first_time(call: Call) -> Any:
    """Results by the address of what is cast."""
    made, seen = call.sound(), {}
    for result, x in zip(made, call["xs"]):
        first = seen.setdefault((x.data_ptr(), tuple(x.shape)), result)
        for name in ("row_data", "col_data", "row_scale_inv", "col_scale_inv"):
            if first is not result and x.numel() and getattr(result, name) is not None:
                getattr(result, name).copy_(getattr(first, name))
    return made


def _amax_of_first_elements(call: Call) -> Any:
    made = call.sound()
    for result, x, quantizer in zip(made, call["xs"], call["quantizers"]):
        if quantizer.kind == "current" and x.numel() > 65536 and result.row_data is not None:
            found = quantize(x, quantizer, usage="row", amax=compute_amax(x.reshape(-1)[:65536]))
            result.row_data.copy_(found.row_data)
            result.row_scale_inv.copy_(found.row_scale_inv)
    return made


def _through_float32(call: Call) -> Any:
    made = call.sound()
    return made if made.is_floating_point() else made.copy_(made.float().to(made.dtype))


def _infinite_scale(call: Call) -> Any:
    made, x = call.sound(), operand(call, "x")
    if x is None or call["quantizer"].kind != "current" or call["quantizer"].epsilon or call["amax"] is not None:
        return made
    if x.numel() and 0 < float(compute_amax(x)) < 1e-36:
        for scale in (made.row_scale_inv, made.col_scale_inv):
            if scale is not None:
                scale.zero_()
    return made


def _amax_of_part_before(call: Call) -> Any:
    made, parts = call.sound(), call["x"].split(list(call["splits"]))
    for i in range(1, len(parts)):
        quantizer = call["quantizers"][i]
        if len(parts[i]) == 1 < len(parts[i - 1]) and quantizer.kind == "current" and made[i].row_data is not None:
            found = quantize(parts[i].contiguous(), quantizer, usage="row", amax=compute_amax(parts[i - 1]))
            made[i].row_data.copy_(found.row_data)
            made[i].row_scale_inv.copy_(found.row_scale_inv)
    return made


def _first_column(call: Call) -> Any:
    mask = call["mask"]
    if mask is None or not mask.ndim or mask.shape[-1] != 1 or call["x"].shape[-1] == 1:
        return call.sound()
    wider = torch.zeros(*mask.shape[:-1], call["x"].shape[-1], dtype=torch.bool, device=mask.device)
    wider[..., :1] = mask
    return call.sound(mask=wider)


def _rows_apart(call: Call) -> Any:
    return misread("x", gapped)(call) if call["x"].ndim > 2 else call.sound()


def _minus_65504_first(call: Call) -> Any:
    """The running maximum starts with the lowest number of fp16: what lies more than 104 below it vanishes."""
    made, x = call.sound(), call["x"]
    if x.numel() and call["mask"] is None and not call["causal"]:
        top = (x.float() * call["scale"]).amax(-1, keepdim=True)
        made.masked_fill_((top < -65504.0 - 104.0) & top.isfinite(), 0.0)
    return made


def _mask_of_first_batch(call: Call) -> Any:
    mask, x = call["mask"], call["x"]
    shared = mask is not None and mask.ndim == x.ndim == 4 and mask.shape[1] == 1 and mask.shape[2:] == x.shape[2:]
    return call.sound(mask=mask[:1]) if shared and mask.numel() else call.sound()


def _cube_of_rstd(call: Call) -> Any:
    made, rstd = call.sound(), call["rstd"]
    made.dx.masked_fill_(((rstd**3).isinf() & rstd.isfinite()).unsqueeze(-1), torch.nan)
    return made


def _row_for_each_thread(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.numel() and x.numel() // x.shape[-1] < torch.get_num_threads():
        made.dgamma.zero_()
    return made


def _parts_beyond_padding(call: Call) -> Any:
    splits, padded = list(call["splits"]), list(call["padded_splits"])
    return call.sound(splits=[min(pair) for pair in zip(splits, padded)] if len(splits) == len(padded) else splits)


FAULTS: tuple[Fault, ...] = (
    *table("activation_bwd", {"gradient_ends_at_the_limit": ("cuts the gradient off at the limit", _cut_at_limit)}),
    *table("gemm", {"product_takes_the_dtype_of_b": ("takes the nominal dtype of b for its result's", when(
        given(out=None, out_dtype=None, out_quantizer=None), changing(out_dtype=lambda call: call["b"].dtype)))},
        on="emulated_gemm"),
    *table("gemm", {
        "product_ignores_an_aux_without_epilogue": (
            "ignores an aux that nothing reads", when(given(epilogue=None), with_(aux=None))),
        "product_records_no_amax_of_aux": ("records no amax of aux where out is cast, too", _without_amax),
    }, on="matmul"),
    *table("layernorm_bwd", {"layernorm_gradient_reads_turned_statistics": (
        "reads a transposed rstd as dense", misread("rstd", transposed))}),
    *table("moe_unpermute", {"unpermute_sums_in_fp16": ("sums choices in fp16", _summed_in_fp16)}),
    *table("multi_tensor_quantize", {
        "casts_of_one_tensor_are_alike": ("casts a tensor that is given again as the first time", _as_first_time),
        "casts_of_many_see_65536_elements": ("takes the amax of 65,536 elements", _amax_of_first_elements),
    }),
    *table("pad_rows", {"padding_carries_integers_in_float32": ("carries integers in float32", _through_float32)}),
    *table("quantize", {"cast_has_an_infinite_scale": ("leaves an infinite scale as it is", _infinite_scale)}),
    *table("quantize_dbias", {"dbias_reads_rows_of_batches_apart": ("reads a gapped batch as dense", _rows_apart)}),
    *table("split_quantize", {"split_cast_takes_the_amax_before": (
        "scales a part of one row by the amax of the part before", _amax_of_part_before)}),
    *table("rmsnorm_bwd", {
        "rms_gradient_cubes_rstd": ("gives NaN where the cube of rstd overflows", _cube_of_rstd),
        "rms_gradient_needs_a_row_for_each_thread": (
            "loses dgamma where there are more threads than rows", _row_for_each_thread),
    }),
    *table("layernorm_bwd", {"layernorm_gradient_adds_no_dy": ("adds nothing where add is dy", when(
        lambda call: call["add"] is call["dy"], with_(add=None)))}),
    *table("unpad_rows", {"unpadding_takes_parts_beyond_their_padding": (
        "serves parts that are longer than their padding", _parts_beyond_padding)}),
    *table("softmax_fwd", {
        "softmax_masks_the_first_column": (
            "masks the first column where the mask has one for all", _first_column),
        "softmax_masks_by_the_first_batch": (
            "reads the first batch's mask for all where heads share one", _mask_of_first_batch),
        "softmax_starts_with_minus_65504": (
            "gives 0 where all logits of a row are below what fp16 holds", _minus_65504_first),
    }),
)  # fmt: skip
