# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults against single clauses of the contracts, to which the kit was blind until an adversary read them."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.formulas import softmax_scale
from te_dispatch_faulty.spoiling import (
    Memory,
    changing,
    given,
    operand,
    remembering,
    rows_of,
    table,
    when,
    with_,
    with_members,
)
from te_dispatch_torch.quantize import dequantize, quantize


def _dbias_of_first_batch(call: Call) -> Any:
    """Of plain calls: sums the first of several batches."""
    made, dy, x = call.sound(), call["dy"], operand(call, "x")
    if call["with_dbias"] and x is not None and dy.ndim == 3 and len(dy) > 1 and call["quantizer"] is None:
        made.dbias.copy_(call.sound(dy=dy[:1], x=x[:1]).dbias)
    return made


def _empty_groups_kept(call: Call) -> Any:
    """Gradients of weights that met no rows are left as they were."""
    before = [out.clone() for out in call["out"]]
    made = call.sound()
    for out, old, group in zip(made, before, call["b"]):
        if not group.shape[0]:
            out.copy_(old)
    return made


def _first_splits(call: Call, memory: Memory) -> Any:
    """Reads splits on the device once for each address."""
    splits = call["splits"]
    rows = memory.kept.setdefault((splits.data_ptr(), len(splits)), splits.tolist())
    if sum(rows) != rows_of(call["a"][0]):
        return call.sound()
    return call.sound(splits=torch.tensor(rows, dtype=splits.dtype, device=splits.device))


def _from_next_vector(call: Call) -> Any:
    """Starts at the first whole vector of 16 bytes."""
    x = call["x"]
    if not x.is_contiguous() or not x.numel() or not x.data_ptr() % 16:
        return call.sound()
    head = (16 - x.data_ptr() % 16) // x.element_size()
    return call.sound(x=x.reshape(-1)[head:]) if x.numel() > head else call.sound()


def _negative_converted(call: Call) -> Any:
    x = call["x"]
    if x.encoding != "e4m3fnuz":
        return call.sound()
    parts = {name: getattr(x, name) for name in ("row_data", "col_data") if getattr(x, name) is not None}
    smaller = {name: torch.where(data == 0xFF, data - 1, data) for name, data in parts.items()}
    return call.sound(x=with_members(x, **smaller))


def _aux_behind_gelu(call: Call) -> Any:
    """Keeps gelu(z), cast, where z is asked for."""
    made, quantizer = call.sound(), call["aux_quantizer"]
    if call["epilogue"] == "gelu" and quantizer is not None and quantizer.kind == "current":
        out = made.out if isinstance(made.out, torch.Tensor) else dequantize(made.out, dtype=torch.float32)
        kept = quantize(out.float(), quantizer, usage="row")
        made.aux.row_data.copy_(kept.row_data)
        made.aux.row_scale_inv.copy_(kept.row_scale_inv)
    return made


def _zeros(call: Call) -> Any:
    for out in call["outputs"]:
        out.zero_()


def _amax_of_this_call(call: Call) -> Any:
    amax = getattr(call["quantizer"], "amax", None)
    if amax is not None:
        amax.zero_()
    return call.sound()


def _scales_as_they_lie(call: Call) -> Any:
    made, scales = call.sound(), call["x"].row_scale_inv
    if call["x"].scaling == "block_2d" and scales.shape[0] == scales.shape[1]:
        made.col_scale_inv.copy_(scales)
    return made


def _blocks_of_rows_served(call: Call) -> Any:
    x = call["x"]
    if x.scaling != "block_1d":
        return call.sound()
    data = x.row_data.reshape(-1, x.shape[-1]).t().contiguous()
    return call.delivered(with_members(x, col_data=data, col_scale_inv=x.row_scale_inv.t().contiguous()))


def _without_derivative_of_cap(call: Call) -> Any:
    """Omits tanh's derivative from dq and dk, in dense calls that have no other option than a softcap."""
    made = call.sound()
    plain = given(window=None, bias_type="none", dropout_p=0, softmax_type="vanilla", mask="none", dqkv_quantizer=None)
    q, k, v, out = (operand(call, name) for name in ("q", "k", "v", "out"))
    if q is None or k is None or v is None or out is None or not q.numel() or not k.numel():
        return made
    if not call["softcap"] or call["layout"] == "thd" or not plain(call):
        return made
    order = (0, 2, 1, 3) if call["layout"] == "bshd" else (1, 2, 0, 3)
    back = (0, 2, 1, 3) if call["layout"] == "bshd" else (2, 0, 1, 3)
    groups, scale = k.shape[-2], softmax_scale(call, q)
    q, k, v, out, dout = (x.float().permute(order) for x in (q, k, v, out, call["dout"]))
    k, v = (x.repeat_interleave(q.shape[1] // groups, 1) for x in (k, v))
    capped = call["softcap"] * torch.tanh(scale * q @ k.transpose(-1, -2) / call["softcap"])
    weights = torch.exp(capped - call["lse"].unsqueeze(-1))
    scores = scale * weights * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
    made.dq.copy_((scores @ k).permute(back))
    dk = scores.transpose(-1, -2) @ q
    made.dk.copy_(dk.view(dk.shape[0], groups, -1, *dk.shape[2:]).sum(2).permute(back))
    return made


def _slopes_kept(call: Call, memory: Memory) -> Any:
    """Reads the slopes of ALiBi once for each address."""
    slopes = call["alibi_slopes"]
    if slopes is None:
        return call.sound()
    key = (slopes.data_ptr(), slopes.shape)
    return call.sound(alibi_slopes=memory.kept.setdefault(key, slopes.detach().clone()))


def _lone_columns_as_rows(call: Call) -> Any:
    x = call["x"]
    if not isinstance(x, Quantized) or x.row_data is not None or x.scaling != "tensor":
        return call.sound()
    rows = x.col_data.reshape(x.shape)
    return call.sound(x=with_members(x, row_data=rows, row_scale_inv=x.col_scale_inv, col_data=None))


def _flat_record(call: Call) -> Any:
    made = call.sound()
    if call["out"] is None and len(made.shape) > 3:
        made.shape = (made.rows(), made.shape[-1])
    return made


def _subnormal_amax_of_zero(call: Call) -> Any:
    """Of current scaling without an amax that is given."""
    x, quantizer = operand(call, "x"), call["quantizer"]
    if x is None or not x.numel() or not isinstance(quantizer, CurrentQuantizer) or call["amax"] is not None:
        return call.sound()
    flushed = x.detach().nan_to_num(0.0, torch.inf, -torch.inf).abs().max() < torch.finfo(torch.float32).tiny
    return call.sound(amax=torch.zeros(1, device=x.device)) if flushed else call.sound()


FAULTS: tuple[Fault, ...] = (
    *table("activation_bwd", {"dbias_of_first_batch": ("sums dbias over the first batch", _dbias_of_first_batch)}),
    *table("grouped_gemm", {"grouped_keeps_out_of_empty_groups": (
        "leaves the gradient of a weight that met no rows unwritten",
        when(given(layout="TN", accumulate=False, out=...), _empty_groups_kept))}, on="grouped_matmul"),
    *table("grouped_gemm", {"grouped_remembers_splits": (
        "remembers the splits that a tensor held first", remembering(_first_splits))},
        on="grouped_matmul_device_splits"),
    *table("compute_amax", {"amax_skips_misaligned_head": (
        "skips what lies before the first whole vector", _from_next_vector)}),
    *table("convert_encoding", {"conversion_raises_for_7f_alone": (
        "raises for 7F and converts FF", _negative_converted)}, on="convert_encoding_checked"),
    *table("gemm", {"product_keeps_gelu_of_z": ("casts gelu(z) for aux", _aux_behind_gelu)}, on="emulated_gemm"),
    *table("layernorm_fwd", {"layernorm_takes_eps_of_zero_for_none": (
        "takes the default for an eps of 0", when(given(eps=0.0), with_(eps=1e-5)))}),
    *table("activation_fwd", {"activation_reads_lone_columns_as_rows": (
        "takes the codes of a transposed copy alone for those of rows", _lone_columns_as_rows)}),
    *table("attention_fwd", {"attention_keeps_slopes_by_address": (
        "remembers the slopes of ALiBi that a tensor held first", remembering(_slopes_kept))}, on="unfused_attention"),
    *table("quantize", {
        "record_of_four_dimensions_is_flat": (
            "gives the record of a tensor of more than three dimensions two", _flat_record),
        "quantize_flushes_subnormal_amaxes": ("takes a subnormal amax for 0", _subnormal_amax_of_zero),
    }),
    *table("multi_tensor_adam", {"adam_does_nothing_at_rate_zero": (
        "leaves the moments as they are where lr is 0", when(given(lr=0.0), lambda call: None))}),
    *table("multi_tensor_scale", {"scale_of_zero_clears": (
        "writes zeros for a scale of 0, whatever the inputs are", when(given(scale=0.0), _zeros))}),
    *table("quantize_dbias", {"dbias_cast_overwrites_amax": ("overwrites the recorded amax", _amax_of_this_call)}),
    *table("transpose_quantized", {
        "transpose_copies_square_scales": ("copies the scales of squares as they lie", _scales_as_they_lie),
        "transpose_serves_blocks_of_rows": ("transposes block_1d instead of refusing it", _blocks_of_rows_served),
    }),
    *table("attention_fwd", {"attention_takes_scale_of_zero_for_none": (
        "takes the default for a softmax_scale of 0", when(given(softmax_scale=0.0), changing(
            softmax_scale=lambda call: None)))}, on="unfused_attention"),
    *table("attention_bwd", {"attention_gradient_forgets_derivative_of_cap": (
        "leaves tanh's derivative out of dq and dk", _without_derivative_of_cap)}, on="unfused_attention_bwd"),
)  # fmt: skip
