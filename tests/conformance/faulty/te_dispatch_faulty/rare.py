# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults with special values in rare places (the first element, the last tensor of a list, position 0), and with
arithmetic that is nearly precise enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    Change,
    Memory,
    changing,
    given,
    member,
    operand,
    remembering,
    spoiled,
    table,
    when,
)

_FP32 = torch.float32


def _nan_first(call: Call) -> Any:
    """Starts the maximum with the first element, NaN or not."""
    made, x = call.sound(), call["x"]
    if x.numel() and bool(x.reshape(-1)[0].isnan()):
        made.fill_(torch.nan)
    return made


def _records_nan_first(call: Call) -> Any:
    made, x, amax = call.sound(), call["x"], getattr(call["quantizer"], "amax", None)
    if amax is not None and x.numel() and bool(x.reshape(-1)[0].isnan()):
        amax.fill_(torch.nan)
    return made


def _maximum_of_first_half(call: Call) -> Any:
    """Looks for -Inf in the second half of the rows only, so that a row of nothing else gives NaN."""
    made, x = call.sound(), call["x"]
    if x.ndim and x.shape[-1] > 1 and call["mask"] is None and not call["causal"]:
        lost = (x[..., : x.shape[-1] // 2] == -torch.inf).all(-1, keepdim=True)
        made.masked_fill_(lost.expand(made.shape), torch.nan)
    return made


def _flag_of_first(name: str) -> Behaviour:
    """Raises the flag for the first tensor of a list only."""

    def behave(call: Call) -> Any:
        flag, lists = call["noop_flag"], call[name]
        before = None if flag is None else flag.clone()
        made = call.sound()
        if flag is not None and lists and bool(lists[0].isfinite().all()):
            flag.copy_(before)
        return made

    return behave


def _last_element_lost(call: Call) -> Any:
    """Takes NaN in the last element of a tensor for 0."""
    cut = [t.clone() for t in call["tensors"]]
    for tensor in cut:
        if tensor.numel() and bool(tensor.view(-1)[-1].isnan()):
            tensor.view(-1)[-1] = 0.0
    return call.sound(tensors=cut)


def _column_only(call: Call) -> Any:
    """Reads the row-wise scale, which a column-wise record lacks, as 1."""
    made = call.sound()
    if call["x"].row_data is None and made.col_scale_inv is not None:
        made.col_scale_inv.mul_(2.0)
    return made


def _most_recent_infinite(call: Call) -> Any:
    """Keeps no scale where an older row of the history is Inf, although the newest one counts."""
    if call["algorithm"] != "most_recent":
        return call.sound()
    before = [s.clone() for s in call["scales"]]
    infinite = [h.isinf().any(0) & h[0].isfinite() for h in call["histories"]]
    made = call.sound()
    for scale, old, lost in zip(call["scales"], before, infinite):
        scale.copy_(torch.where(lost, old, scale))
    return made


def _zero_blocks(call: Call) -> Any:
    """Gives blocks of zeros the scale of their neighbour."""
    made = call.sound()
    scale = made.row_scale_inv
    if made.scaling == "nvfp4" and scale is not None and scale.numel() > 1:
        flat = scale.view(-1)
        lost = (flat == 0) & (flat.roll(1) != 0)
        flat.copy_(torch.where(lost, flat.roll(1), flat))
    return made


def _position_zero(call: Call) -> Any:
    """Copies position 0, whose angle is 0, wherever offsets say that it lies."""
    made, x = call.sound(), call["x"]
    if call["layout"] == "sbhd" and made.numel() and call["offsets"] is not None:
        made[0].copy_(x[0])
    return made


def _hidden_nan_scale(call: Call) -> Any:
    """Reads E8M0's 255, which is NaN, as 2^128."""
    x = call["x"]
    if x.scaling != "mxfp8" or x.row_scale_inv is None:
        return call.sound()
    made = call.sound()
    return made.nan_to_num_(nan=0.0) if not (x.row_data & 0x7F).max() > 0x7E else made


def _empty_row(call: Call) -> Any:
    """Divides by the sum of a row that no key is left in, plus 1e-9: the log-sum-exp becomes finite."""
    made = call.sound()
    if made.lse is not None:
        made.lse.copy_(made.lse.clamp_min(math.log(1e-9)))
    return made


def _seed_zero(call: Call, memory: Memory) -> Any:
    """Takes a seed of 0 for none."""
    state = call["rng_state"]
    if state is not None and int(state[0]) == 0:
        return call.sound(rng_state=torch.tensor([memory.calls, 7], device=state.device))
    return call.sound()


_PLACES = (
    *table("compute_amax", {"amax_starts_with_the_first_element": (
        "gives NaN where the first element is", _nan_first)}),
    *table("quantize", {
        "quantize_starts_with_the_first_element": ("records NaN where the first element is", _records_nan_first),
        "nvfp4_scales_zero_blocks_like_neighbours": ("gives blocks of zeros a neighbour's scale", _zero_blocks),
    }),
    *table("softmax_fwd", {"softmax_loses_rows_whose_half_is_infinite": (
        "gives NaN where the first half of a row is -Inf", _maximum_of_first_half)}),
    *table("multi_tensor_scale", {"scale_looks_at_the_first_tensor": (
        "raises the flag for Inf in the first tensor only", _flag_of_first("inputs"))}),
    *table("multi_tensor_l2norm", {"l2norm_loses_nan_in_the_last_element": (
        "takes NaN in the last element for 0", _last_element_lost)}),
    *table("convert_encoding", {"convert_doubles_lone_columns": (
        "scales a record without a row-wise copy wrongly", _column_only)}),
    *table("update_delayed_scales", {
        "update_minds_old_infinities": ("keeps scales for an Inf that does not count", _most_recent_infinite),
        "update_ignores_subnormal_amaxes": (
            "takes a subnormal amax for 0", lambda call: _subnormal_amax(call)),
    }),
    *table("rope_fwd", {"rope_copies_position_zero": (
        "copies the first position in spite of offsets", _position_zero)}),
    *table("dequantize", {"dequantize_reads_nan_scales_as_zero": (
        "gives 0 where a block's scale is NaN", _hidden_nan_scale)}),
    *table("attention_fwd", {"attention_gives_finite_lse_for_no_keys": (
        "adds 1e-9 to the softmax's denominator", _empty_row)}, on="unfused_attention"),
    *table("dropout_add_fwd", {
        "dropout_takes_seed_0_for_none": ("draws anew where the seed is 0", remembering(_seed_zero)),
    }),
)  # fmt: skip


def _subnormal_amax(call: Call) -> Any:
    before = [s.clone() for s in call["scales"]]
    small = [(h.nan_to_num(0.0).amax(0) < 2.0**-126) for h in call["histories"]]
    made = call.sound()
    for scale, old, lost in zip(call["scales"], before, small):
        scale.copy_(torch.where(lost, old, scale))
    return made


def _times(factor: float) -> Change:
    return lambda values: values * factor


def _next(values: torch.Tensor) -> torch.Tensor:
    """One unit in the last place."""
    return torch.where(values == 0, values, torch.nextafter(values, values * 2))


def _norm_term_in_bf16(call: Call) -> Any:
    """Rounds the mean of dy gamma x rstd to bf16."""
    made, x, dy, rstd = call.sound(), call["x"].float(), call["dy"].float(), call["rstd"].unsqueeze(-1)
    if not x.numel() or call["add"] is not None:
        return made
    gamma = call["gamma"].float() + (1.0 if call["zero_centered_gamma"] else 0.0)
    normal, weighted = x * rstd, dy * gamma
    mean = (normal * weighted).mean(-1, keepdim=True).bfloat16().float()
    made.dx.copy_((weighted - normal * mean) * rstd)
    return made


def _dot_in_bf16(call: Call) -> Any:
    made, y, dy = call.sound(), call["y"].float(), call["dy"].float()
    if not y.numel():
        return made
    dot = (y * dy).sum(-1, keepdim=True).bfloat16().float()
    return made.copy_(call["scale"] * y * (dy - dot))


def _dprobs_in_bf16(call: Call) -> Any:
    made = call.sound()
    if made.dprobs is not None and made.dprobs.dtype == _FP32:
        made.dprobs.copy_(made.dprobs.bfloat16())
    return made


def _bias_in_fp16(call: Call) -> Any:
    """As LLVM's instcombine makes one addition in fp16 of fp16 and bf16 numbers that are widened, added and rounded."""
    x, bias = call["x"], call["bias"]
    mixed = bias is not None and bias.dtype == torch.bfloat16 and x.dtype == torch.float16
    return call.sound(bias=bias.half()) if mixed else call.sound()


def _gradients_in_fp16(call: Call) -> Any:
    """The same of a product of bf16 numbers."""
    made, dy, row_map, probs = call.sound(), call["dy"], call["row_map"], call["probs"]
    if probs is None or made.dinput.dtype != torch.float16 or {dy.dtype, probs.dtype} != {torch.bfloat16}:
        return made
    kept = row_map >= 0
    products = dy.half()[:, None] * probs.half()[..., None]
    made.dinput[row_map[kept].long()] = products[kept]
    return made


def _keep_scale_in_bf16(call: Call) -> Any:
    """Multiplies by 1 / (1 - p) rounded to bf16."""
    made, p = call.sound(), call["dropout_p"]
    if p:
        wrong = float(torch.tensor(1 / (1 - p), device="cpu").bfloat16())
        made.copy_(made.float() * (wrong * (1 - p)))
    return made


def _reduced_far(call: Call) -> Any:
    """Reduces angles with 2 pi in bf16 steps once they exceed 10,000."""
    freqs = call["freqs"]
    wrong = torch.where(freqs.abs() > 1e4, freqs * (1 + 2.0**-22), freqs)
    return call.sound(freqs=wrong)


def _through(path: str, dtype: torch.dtype) -> Behaviour:
    """A result of fp32 that was rounded to a narrower dtype on its way."""
    return spoiled(path, change=lambda v: v.to(dtype).to(v.dtype) if v.dtype == _FP32 else v)


def _fp32_only(path: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Behaviour:
    """Where operands and result are fp32."""

    def behave(call: Call) -> Any:
        made = call.sound()
        found = member(made, path)
        x = operand(call, name)
        if found is not None and x is not None and found.dtype == x.dtype == _FP32:
            with torch.no_grad():
                found.detach().copy_(change(found.detach()))
        return made

    return behave


def _half_exp(call: Call) -> Any:
    """Rounds probabilities to fp16 before it multiplies by v: v is rounded here, which errs as much."""
    v = operand(call, "v")
    return call.sound() if v is None or v.dtype != _FP32 else call.sound(v=v.half().float())


_LOOSE = (
    *table("rmsnorm_bwd", {"rms_gradient_rounds_its_mean_to_bf16": (
        "rounds the mean that it subtracts to bf16", _norm_term_in_bf16)}),
    *table("softmax_bwd", {"softmax_gradient_rounds_its_sum_to_bf16": ("rounds sum(y dy) to bf16", _dot_in_bf16)}),
    *table("layernorm_fwd", {"layernorm_takes_rstd_in_12_bits": (
        "takes 1 / sqrt from a table of 12 bits", _fp32_only("y", "x", _times(1 + 2.0**-12)))}),
    *table("activation_fwd", {"silu_exponentiates_in_11_bits": (
        "takes exp from a table of 11 bits", when(given(kind=("silu", "swiglu")), _fp32_only(
            "out", "x", _times(1 + 2.0**-11))))}),
    *table("attention_fwd", {
        "attention_rounds_probabilities_to_fp16": ("rounds probabilities of fp32 operands to fp16", _half_exp),
        "attention_takes_log_in_10_bits": ("takes the logarithm from a table of 10 bits", spoiled(
            "lse", change=lambda v: torch.where(v.isfinite(), v + 2.0**-10, v))),
    }, on="unfused_attention"),
    *table("dropout_add_bwd", {"dropout_gradient_scales_in_bf16": ("rounds 1 / (1 - p) to bf16", _keep_scale_in_bf16)}),
    *table("moe_unpermute_bwd", {
        "dprobs_are_rounded_to_bf16": ("rounds dprobs to bf16", _dprobs_in_bf16),
        "gradients_are_multiplied_in_fp16": ("converts bf16 gradients and probabilities to fp16", _gradients_in_fp16),
    }),
    *table("dropout_add_fwd", {"bias_is_added_in_fp16": ("converts a bf16 bias to fp16", _bias_in_fp16)}),
    *table("quantize_dbias", {"dbias_is_rounded_twice": (
        "rounds the bias gradient to bf16 before fp32", _through("dbias", torch.bfloat16))}),
    *table("multi_tensor_l2norm", {"l2norm_takes_root_in_12_bits": (
        "takes the square root from a table of 12 bits", spoiled(change=_times(1 + 2.0**-12)))}),
    *table("rope_fwd", {"rope_reduces_far_angles_loosely": ("is loose for angles beyond 10,000", _reduced_far)}),
    *table("update_delayed_scales", {"update_multiplies_by_reciprocals": (
        "computes max * (1 / amax)", lambda call: _reciprocal(call))}),
    *table("layernorm_bwd", {"dgamma_is_rounded_to_fp16": (
        "rounds dgamma to fp16 before fp32", _through("dgamma", torch.float16))}),
    *table("gemm", {"product_rounds_alpha_to_fp16": ("rounds alpha to fp16", changing(
        alpha=lambda call: float(torch.tensor(call["alpha"], device="cpu").half())))}, on="matmul"),
    *table("multi_tensor_adam", {"adam_takes_roots_in_11_bits": (
        "takes 1 / (sqrt(v) + eps) from a table of 11 bits", when(
            lambda call: call["params"][0].dtype == _FP32, changing(lr=lambda call: call["lr"] * (1 + 2.0**-11))))}),
)  # fmt: skip


def _reciprocal(call: Call) -> Any:
    before = [s.clone() for s in call["scales"]]
    made = call.sound()
    for scale, old in zip(call["scales"], before):
        changed = (scale != old) & scale.isfinite() & (scale.abs() > 1e-30) & (scale.abs() < 1e30)
        mantissa = torch.frexp(scale).mantissa
        scale.copy_(torch.where(changed & (mantissa != 0.5) & (mantissa < 0.625), _next(scale), scale))
    return made


FAULTS: tuple[Fault, ...] = (*_PLACES, *_LOOSE)
