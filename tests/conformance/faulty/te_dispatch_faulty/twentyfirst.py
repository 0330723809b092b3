# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the twenty-first set, written from the contracts alone: the one that the kit missed, and those of the
others that are least like what was seeded before."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import GATED
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Memory,
    expanded,
    gapped,
    operand,
    remembering,
    rows_of,
    table,
    with_members,
    without_graph,
)
from te_dispatch_torch.quantize import quantize

_PARTS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
#: Tensors of one launch; elements of a vector; rows of a partial sum.
_LAUNCH, _VECTOR, _PARTIAL = 64, 8, 16


def _kind(quantizer: Any) -> str:
    return getattr(quantizer, "kind", "")


def _lists(*values: Any) -> bool:
    return all(isinstance(value, (list, tuple)) for value in values)


def _can_be_written(x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or expanded(x):
        return False
    return torch.is_inference_mode_enabled() or not x.is_inference()


def _storage(x: torch.Tensor) -> torch.Tensor:
    size = x.untyped_storage().nbytes() // x.element_size()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (size,), (1,))


def _copy_parts(into: Quantized, new: Quantized) -> None:
    for name in _PARTS:
        target, source = getattr(into, name), getattr(new, name)
        if target is not None and source is not None:
            target.copy_(source)


def _silent(quantizer: Quantizer) -> Quantizer:
    """The same cast, recording nothing."""
    return dataclasses.replace(quantizer, amax=None) if quantizer.kind == "delayed" else quantizer


# docs/operators.md: "`rows`: the last dimension contiguous, the others with any strides ... x of `quantize`".
@without_graph
def _one_stride_of_rows(call: Call) -> Any:
    x = operand(call, "x")
    if x is None or x.ndim < 3 or not x.numel() or x.stride(-1) != 1:
        return call.sound()
    places = torch.arange(rows_of(x), device=x.device)[:, None] * x.stride(-2)
    places = x.storage_offset() + places + torch.arange(x.shape[-1], device=x.device)
    whole = _storage(x.detach())
    return call.sound(x=whole[places % whole.numel()].view(x.shape))


# docs/numerics.md, The cast: "scale_inv = RN32(1 / scale)", of the scale in force for this cast.
@without_graph
def _first_inverse(call: Call, memory: Memory) -> Any:
    made, quantizer = call.sound(), call["quantizer"]
    if _kind(quantizer) != "delayed" or call["out"] is not None:
        return made
    inverses = memory.kept.setdefault("of quantizers", weakref.WeakKeyDictionary())
    scales = [scale for scale in (made.row_scale_inv, made.col_scale_inv) if scale is not None]
    if quantizer not in inverses:
        inverses[quantizer] = scales[0].clone()
    for scale in scales:
        scale.copy_(inverses[quantizer])
    return made


# relayout_scales: "``gemm_2d``: block_2d scales, rows padded: row-wise (ceil(M/128), roundup(ceil(K/128), 4))".
@without_graph
def _pitch_without_padding(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.scale_layout != "gemm_2d" or x.row_data is None:
        return made
    scale, columns = x.row_scale_inv, -(-x.shape[-1] // 128)
    read = torch.zeros_like(scale)
    count = scale.shape[0] * columns
    read[:, :columns] = scale.reshape(-1)[:count].view(scale.shape[0], columns)
    return call.sound(x=with_members(x, row_scale_inv=read))


# docs/operators.md: "A call writes what the docstring says ...: neither lists nor the labels and members of records".
@without_graph
def _copy_left_in_operand(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.col_data is None:
        x.col_data, x.col_scale_inv = made.col_data, made.col_scale_inv
    return made


# split_quantize: "cast every part with its own quantizer".
@without_graph
def _scales_of_first_launch(call: Call) -> Any:
    made, x, splits, quantizers = call.sound(), call["x"], call["splits"], call["quantizers"]
    if len(made) > _LAUNCH and quantizers[0].kind == "delayed":
        parts = x.detach().split(list(splits))
        for i in range(_LAUNCH, len(made)):
            if parts[i].numel():
                _copy_parts(made[i], quantize(parts[i], _silent(quantizers[i % _LAUNCH]), usage=call["usage"]))
    return made


# multi_tensor_quantize: "Each result equals `quantize` of that tensor"; operators.md: "The same tensor may be several
# items of a list that is only read".
@without_graph
def _same_tensor_cast_once(call: Call) -> Any:
    made, first = call.sound(), {}
    for i, (x, quantizer) in enumerate(zip(call["xs"], call["quantizers"])):
        if not x.numel():
            continue
        at = (x.data_ptr(), tuple(x.shape), x.stride())
        if at in first and first[at].scale_layout == quantizer.scale_layout:
            _copy_parts(made[i], quantize(x.detach(), _silent(first[at]), usage=call["usage"]))
        first.setdefault(at, quantizer)
    return made


# compute_amax: "max |x| as float32 (1,): NaN ignored".
@without_graph
def _vectors_with_nan_left_out(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if not x.numel():
        return made
    flat = x.detach().reshape(-1).float().abs()
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _VECTOR)).view(-1, _VECTOR)
    return made.copy_(torch.where(flat.isnan().any(1, keepdim=True), 0.0, flat).amax().view(1))


# docs/operators.md: "an error names the argument, ..., before anything is written".
@without_graph
def _counted_before_refused(call: Call) -> Any:
    try:
        return call.sound()
    except ValueError:
        if operand(call, "count") is not None and call["overflow"] == "error":
            with contextlib.suppress(TypeError, ValueError):
                call.sound(overflow="saturate")
        raise


# gemm: "A `Quantized` stands for its values, scales included".
@without_graph
def _scale_of_the_last_whole_block(call: Call) -> Any:
    a = call["a"]
    if not isinstance(a, Quantized) or a.scaling != "block_1d" or call["layout"] == "TN":
        return call.sound()
    scale, k = a.row_scale_inv, a.shape[-1]
    if a.row_data is None or scale is None or a.scale_layout != "canonical" or k < 128 or not k % 128:
        return call.sound()
    if scale.ndim != 2 or scale.shape[1] < 2:
        return call.sound()
    read = scale.clone()
    read[:, -1] = read[:, -2]
    return call.sound(a=with_members(a, row_scale_inv=read))


# docs/operators.md: "A call writes what the docstring says ..., and nothing else of its arguments: neither lists".
@without_graph
def _list_split_in_place(call: Call) -> Any:
    made, a, splits = call.sound(), call["a"], call["splits"]
    if isinstance(a, list) and _lists(splits) and isinstance(a[0], torch.Tensor):
        a[:] = a[0].split(list(splits))
    return made


# attention.py: "Masked means: beyond a sequence's length (``padding`` masks)".
@without_graph
def _pages_read_whole(call: Call) -> Any:
    bounds, k = operand(call, "cu_seqlens_kv"), call["k"]
    made = call.sound()
    if call["page_table"] is None or bounds is None or call["mask"] not in ("padding", "padding_causal"):
        return made
    size = k.shape[1]
    whole = (bounds.diff() + size - 1) // size * size
    return call.sound(cu_seqlens_kv=torch.cat((torch.zeros_like(bounds[:1]), whole.cumsum(0).to(bounds.dtype))))


# docs/writing_a_backend.md: "It writes only what the operator's docstring says is written".
@without_graph
def _padding_of_gradients_cleared(call: Call) -> Any:
    made, dout, bounds = call.sound(), operand(call, "dout"), operand(call, "cu_seqlens_q")
    if call["layout"] != "thd" or dout is None or bounds is None or not _can_be_written(dout):
        return made
    starts = bounds if call["cu_seqlens_q_padded"] is None else call["cu_seqlens_q_padded"]
    outside = torch.ones(dout.shape[0], dtype=torch.bool, device=dout.device)
    for start, count in zip(starts.tolist(), bounds.diff().tolist()):
        outside[start : start + count] = False
    if bool(outside.any()):
        dout.detach()[outside] = 0
    return made


# rmsnorm_bwd: "dgamma like gamma, summed in fp32 over all rows", of this call.
@without_graph
def _partial_sums_of_a_longer_call(call: Call, memory: Memory) -> Any:
    made, dy, x, rstd = call.sound(), call["dy"].detach(), call["x"].detach(), call["rstd"].detach()
    terms = (dy.float() * x.float() * rstd.unsqueeze(-1)).reshape(rows_of(x), x.shape[-1])
    sums = [part.sum(0) for part in terms.split(_PARTIAL)] if terms.shape[0] else []
    at = (x.shape[-1], x.device)
    left = memory.kept.get(at, [])[len(sums) :]
    if left:
        made.dgamma.copy_(made.dgamma.float() + torch.stack(left).sum(0))
    memory.kept[at] = sums + left
    return made


# activation.py: "for gated kinds, x = [u, v] split in halves along the last dimension"; operators.md: "any strides".
@without_graph
def _half_of_the_pitch(call: Call) -> Any:
    x = operand(call, "x")
    if x is None or call["kind"] not in GATED or x.ndim != 2 or not x.numel() or x.shape[1] % 2:
        return call.sound()
    if x.stride(1) != 1 or not gapped(x):
        return call.sound()
    half, whole = x.shape[1] // 2, _storage(x.detach())
    rows, columns = (torch.arange(size, device=x.device) for size in (x.shape[0], half))
    places = x.storage_offset() + rows[:, None] * x.stride(0) + x.stride(0) // 2 + columns
    return call.sound(x=torch.cat((x.detach()[:, :half], whole[places % whole.numel()]), 1))


# softmax_fwd: "y = softmax(scale * x) over the last dimension in fp32".
@without_graph
def _largest_before_the_scale(call: Call) -> Any:
    made, x, mask = call.sound(), call["x"], call["mask"]
    if call["scale"] >= 0 or not x.numel():
        return made
    hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None:
        hidden |= mask
    if call["causal"]:
        hidden |= torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    values = x.detach().float()
    top = values.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    powers = ((values - top) * call["scale"]).masked_fill(hidden, -math.inf)
    return made.masked_fill_((powers > 88.7).any(-1, keepdim=True) & ~hidden, math.nan)


# moe_permute: "every (token, choice) becomes one row".
@without_graph
def _expert_chosen_twice(call: Call) -> Any:
    made, indices = call.sound(), call["indices"]
    earlier = torch.ones(indices.shape[1], indices.shape[1], dtype=torch.bool, device=indices.device).tril(-1)
    again = ((indices[:, :, None] == indices[:, None, :]) & earlier).any(-1) & (indices >= 0)
    return call.sound(indices=indices.masked_fill(again, -1)) if bool(again.any()) else made


FAULTS: tuple[Fault, ...] = (
    *table("quantize", {
        "cast_takes_one_stride_for_all_rows": (
            "steps by the stride of the dimension before the last through rows that do not lie so",
            _one_stride_of_rows),
        "cast_keeps_the_inverse_of_a_quantizers_scale": (
            "gives the inverse that it computed when it first saw the quantizer", remembering(_first_inverse)),
    }),
    *table("dequantize", {
        "dequantize_takes_padded_scales_for_compact": (
            "steps through gemm_2d scales as if their rows had no padding", _pitch_without_padding),
    }),
    *table("transpose_quantized", {
        "transposition_keeps_its_copy_in_the_operand": (
            "writes the column-wise copy into the record that it was given", _copy_left_in_operand),
    }),
    *table("split_quantize", {"splits_beyond_64_take_earlier_scales": (
        "casts parts behind the 64th with the scales of the first launch", _scales_of_first_launch)}),
    *table("multi_tensor_quantize", {
        "casts_of_many_cast_a_tensor_once": (
            "gives a tensor that comes twice the codes of its first quantizer", _same_tensor_cast_once),
    }),
    *table("compute_amax", {"amax_leaves_vectors_with_nan_out": (
        "leaves out eight elements of which one is NaN", _vectors_with_nan_left_out)}),
    *table("convert_encoding", {"convert_counts_before_it_refuses": (
        "has added to count when it raises", _counted_before_refused)}, on="convert_encoding_checked"),
    *table("gemm", {
        "partial_block_takes_the_scale_before": (
            "scales the last, partial block of k by the scale before its own", _scale_of_the_last_whole_block),
    }, on="native_gemm"),
    *table("grouped_gemm", {
        "grouped_product_splits_the_callers_list": (
            "replaces the tensor in the caller's list by its parts", _list_split_in_place),
    }, on="grouped_matmul"),
    *table("attention_fwd", {
        "attention_reads_pages_to_their_end": (
            "reads the last page of each sequence beyond the sequence's length", _pages_read_whole),
    }, on="unfused_attention"),
    *table("attention_bwd", {
        "attention_backward_clears_padding_of_dout": (
            "writes zeros to dout's rows that belong to no sequence", _padding_of_gradients_cleared),
    }, on="unfused_attention_bwd"),
    *table("rmsnorm_bwd", {"rmsnorm_gradient_adds_older_sums": (
        "adds partial sums that a call with more rows left", remembering(_partial_sums_of_a_longer_call))}),
    *table("activation_fwd", {
        "gate_reads_at_half_the_pitch": (
            "looks for the second half of a row at half of the row's stride", _half_of_the_pitch),
    }),
    *table("softmax_fwd", {
        "softmax_with_a_negative_scale_overflows": (
            "subtracts the scaled maximum of x, which a negative scale makes the least", _largest_before_the_scale),
    }),
    *table("moe_permute", {
        "permute_drops_a_repeated_expert": (
            "drops a choice whose expert the token has chosen before", _expert_chosen_twice),
    }),
)  # fmt: skip
