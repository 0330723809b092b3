# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the seventeenth set (docs/certification.md): the seven that the kit missed, and those of the others that
are least like what was seeded before."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Memory, lengths_of, operand, remembering, rows_of, table

_HALVES = (torch.bfloat16, torch.float16)


def _dense(call: Call) -> bool:
    return call["layout"] in ("sbhd", "bshd") and call.get("page_table") is None


def _plain(call: Call) -> bool:
    return all(isinstance(call[name], torch.Tensor) for name in ("q", "k", "v"))


def _offset_of_tensors(call: Call) -> Any:
    """Aligns the diagonal to the corner of the tensors in place of that of the sequences."""
    made = call.sound()
    if call["window"] is not None or not _dense(call) or call["mask"] != "padding_causal_bottom_right":
        return made
    rows, columns = lengths_of(call)
    device = call["q"].device
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    lengths = [call[name].diff()[:, None, None, None] for name in ("cu_seqlens_q", "cu_seqlens_kv")]
    hidden = (j > i + columns - rows) | (i >= lengths[0]) | (j >= lengths[1])
    wrong = call.sound(mask="arbitrary", attn_mask=hidden, cu_seqlens_q=None, cu_seqlens_kv=None)
    if isinstance(made.out, torch.Tensor):
        made.out.copy_(wrong.out)
    if made.lse is not None:
        made.lse.copy_(wrong.lse)
    return made


def _cap_with_bias(call: Call) -> Any:
    """cap tanh((c q k + bias) / cap)."""
    made = call.sound()
    if not call["softcap"] > 0 or call["bias_type"] != "post_scale" or not _dense(call) or not _plain(call):
        return made
    cap, q, k = call["softcap"], call["q"].detach().float(), call["k"].detach().float()
    if call["layout"] == "sbhd":
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scale = q.shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
    z, bias = scale * torch.einsum("bihd,bjhd->bhij", q, k), call["bias"].detach()
    moved = cap * torch.tanh((z + bias.float()) / cap) - cap * torch.tanh(z / cap)
    return call.sound(bias=moved.to(bias.dtype))


def _whole_pages(call: Call) -> Any:
    pages, bounds = call["page_table"], call["cu_seqlens_kv"]
    if pages is None or bounds is None or call["k"].ndim != 4:
        return call.sound()
    size = call["k"].shape[1]
    lengths = (bounds.diff() + size - 1) // size * size
    return call.sound(cu_seqlens_kv=torch.cat([bounds[:1], lengths.cumsum(0).to(bounds.dtype)]), max_seqlen_kv=None)


def _aux_behind_sum(call: Call) -> Any:
    if call["epilogue"] != "gelu" or not call["accumulate"] or call["aux_quantizer"] is not None:
        return call.sound()
    before = call["out"].detach().clone()
    made = call.sound()
    made.aux.copy_(made.aux.float() + before.float())
    return made


def _rounded_bias(call: Call) -> Any:
    bias = call["bias"]
    if not isinstance(bias, torch.Tensor) or bias.dtype is not torch.float32:
        return call.sound()
    return call.sound(bias=bias.detach().bfloat16())


def _short_splits(call: Call) -> Any:
    splits, b = call["splits"], call["b"]
    if not isinstance(splits, (list, tuple)) or not 0 < len(splits) < len(b) or call["out"] is not None:
        return call.sound()
    return call.sound(b=b[: len(splits)], bias=None if call["bias"] is None else call["bias"][: len(splits)])


def _negative_zero_drawn(call: Call) -> Any:
    """Puts the sign on after the draw, of codes that are 0 too."""
    made = call.sound()
    if call["rng_state"] is None or made.row_data is None or ENCODINGS[made.encoding].bits != 8:
        return made
    if call["quantizer"].keeps_negative_zero or call["noop_flag"] is not None:
        return made
    made.row_data.masked_fill_((made.row_data == 0) & (call["x"].detach() < 0), 0x80)
    return made


def _amax_never_falls(call: Call, memory: Memory) -> Any:
    """Max-accumulates the tensor's amax into a workspace that it clears for a larger tensor only."""
    made, x, quantizer = call.sound(), call["x"], call["quantizer"]
    if quantizer.kind != "nvfp4" or call["amax"] is not None or not x.numel():
        return made
    found = x.detach().float().abs().nan_to_num(0.0, posinf=torch.inf).max().reshape(1)
    key = (tuple(x.shape), x.dtype, call["usage"])
    before = memory.kept.get(key)
    memory.kept[key] = found if before is None else torch.maximum(before, found)
    if before is None or not before > found or not before.isfinite():
        return made
    return call.sound(amax=before)


def _needs_amax(call: Call) -> Any:
    made, quantizer = call.sound(), call["quantizer"]
    if quantizer.kind == "delayed" and quantizer.amax is None:
        raise RuntimeError("'NoneType' object has no attribute 'data_ptr'")
    return made


def _refuses_late(call: Call) -> Any:
    histories, scales, maxima = call["histories"], call["scales"], call["max_values"]
    if isinstance(histories, (list, tuple)) and len(histories) == len(scales) == len(maxima) > 1:
        amaxes = call["amaxes"] or [None] * len(histories)
        for one in zip(histories, scales, maxima, amaxes):
            last = None if one[3] is None else [one[3]]
            call.sound(histories=[one[0]], scales=[one[1]], max_values=[one[2]], amaxes=last)
        return None
    return call.sound()


def _exponent_plus_one(call: Call) -> Any:
    """floor(log2(amax / max)) + 1 in place of ceil."""
    made, x, quantizer = call.sound(), call["x"], call["quantizer"]
    if quantizer.kind != "mxfp8" or made.row_data is None or call["noop_flag"] is not None or not x.numel():
        return made
    if call["rng_state"] is not None:
        return made
    rows, k = rows_of(x), x.shape[-1]
    padded = torch.nn.functional.pad(x.detach().float().abs().reshape(rows, k), (0, -k % 32))
    ratio = padded.view(rows, -1, 32).nan_to_num(0.0, posinf=torch.inf).amax(-1) / quantizer.max_value
    exact = (torch.frexp(ratio).mantissa == 0.5) & (ratio > 0) & ratio.isfinite()
    exact &= (made.row_scale_inv < 0xFD) & (made.row_scale_inv > 0)
    if not exact.any():
        return made
    wide = exact.repeat_interleave(32, 1)[:, :k].reshape(x.shape)
    halved = call.sound(x=torch.where(wide, x.detach().float() * 0.5, x.detach().float()), out=None)
    made.row_data.copy_(torch.where(wide, halved.row_data, made.row_data))
    made.row_scale_inv.copy_(torch.where(exact, made.row_scale_inv + 1, made.row_scale_inv))
    return made


def _overwrites_amax(name: str) -> Behaviour:
    """Overwrites the amax of a delayed cast."""

    def behave(call: Call) -> Any:
        quantizer = call[name]
        if quantizer is None or quantizer.kind != "delayed" or quantizer.amax is None:
            return call.sound()
        before = quantizer.amax.clone()
        quantizer.amax.zero_()
        try:
            return call.sound()
        except (TypeError, ValueError):
            quantizer.amax.copy_(before)
            raise

    return behave


def _amax_of_dq(call: Call) -> Any:
    quantizer = call["dqkv_quantizer"]
    if quantizer is None or quantizer.kind != "delayed" or quantizer.amax is None:
        return call.sound()
    before = quantizer.amax.clone()
    made = call.sound()
    dq = call.sound(dqkv_quantizer=None).dq
    quantizer.amax.copy_(torch.maximum(before, dq.float().abs().max() if dq.numel() else before))
    return made


def _p_of_1(call: Call) -> Any:
    return call.sound(dropout_p=0.5) if call["dropout_p"] == 1 else call.sound()


def _kinds_mixed(call: Call) -> Any:
    x, splits, quantizers = call["x"], call["splits"], call["quantizers"]
    kinds = {getattr(quantizer, "kind", "") for quantizer in quantizers}
    if isinstance(x, torch.Tensor) and len(kinds) > 1 and "" not in kinds and sum(splits) == x.shape[0]:
        return [
            call.sound(x=part, splits=[part.shape[0]], quantizers=[quantizer])[0]
            for part, quantizer in zip(x.split(list(splits)), quantizers)
        ]
    return call.sound()


def _statistics_of_unrounded(call: Call) -> Any:
    """Takes rstd of x + residual before that is rounded; y is right."""
    made, x, residual = call.sound(), operand(call, "x"), operand(call, "residual")
    if residual is not None and x is not None and x.dtype in _HALVES and made.rstd.numel():
        plain = {"residual": None, "quantizer": None, "out_dtype": None}
        whole = x.detach().float() + residual.detach().float()
        made.rstd.copy_(call.sound(**plain, x=whole, gamma=call["gamma"].detach().float()).rstd)
    return made


def _one_tile(call: Call) -> Any:
    """Launches one tile of lone column-wise scales."""
    made, x = call.sound(), call["x"]
    swizzled = made.scale_layout == "swizzled_32x4x4" and x.scale_layout == "canonical"
    if swizzled and x.row_scale_inv is None and made.col_scale_inv is not None and made.col_scale_inv.numel() > 512:
        made.col_scale_inv.view(-1)[512:] = 0
    return made


FAULTS: tuple[Fault, ...] = (
    *table("attention_fwd", {
        "bottom_right_diagonal_of_the_tensors": (
            "aligns padded sequences to the corner of the tensors, not to their own", _offset_of_tensors),
        "cap_includes_a_bias": ("caps scores behind a bias that is added after the cap", _cap_with_bias),
        "last_pages_are_read_whole": ("attends to all of a sequence's last page", _whole_pages),
    }, on="unfused_attention"),
    *table("attention_bwd", {"gradients_record_dq_alone": (
        "records the amax of dq for all three", _amax_of_dq)}, on="unfused_attention_bwd"),
    *table("gemm", {"aux_holds_the_accumulated": (
        "returns as aux what it has accumulated onto", _aux_behind_sum)}, on="matmul"),
    *table("gemm", {
        "fp8_product_rounds_its_bias": ("rounds an fp32 bias to bf16", _rounded_bias),
        "product_overwrites_the_amax_of_aux": (
            "overwrites the amax that is recorded of aux", _overwrites_amax("aux_quantizer")),
    }, on="native_gemm"),
    *table("grouped_gemm", {"grouped_accepts_short_splits": (
        "leaves out groups that have no split", _short_splits)}, on="grouped_matmul"),
    *table("quantize", {
        "rounding_draws_negative_zero": ("writes 80 for negative values that are rounded to 0", _negative_zero_drawn),
        "nvfp4_amax_never_falls": (
            "keeps the largest amax of calls of one shape for NVFP4", remembering(_amax_never_falls)),
        "mxfp8_exponent_is_floor_plus_one": (
            "takes one more than MXFP8's exponent where that is exact", _exponent_plus_one),
    }),
    *table("quantize_dbias", {"dbias_cast_needs_an_amax": (
        "raises where a delayed cast records nothing", _needs_amax)}),
    *table("split_quantize", {"split_accepts_mixed_kinds": ("serves quantizers of several kinds", _kinds_mixed)}),
    *table("relayout_scales", {"swizzle_of_lone_columns_ends_early": (
        "writes the first tile of lone column-wise scales only", _one_tile)}),
    *table("update_delayed_scales", {"update_refuses_late": (
        "has updated the first history when it refuses a later one", _refuses_late)}),
    *table("rmsnorm_fwd", {"rms_statistics_of_the_unrounded_sum": (
        "gives rstd of x + residual before that is rounded", _statistics_of_unrounded)}),
    *table("dropout_add_fwd", {"dropout_accepts_p_of_1": ("takes a probability of 1 for 1/2", _p_of_1)}),
)  # fmt: skip
