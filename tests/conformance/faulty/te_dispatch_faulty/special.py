# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults with special values (NaN, Inf, zeros, subnormals, huge and tiny numbers) and with loose arithmetic."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    all_of,
    changing,
    finite,
    given,
    nan_lost,
    operand,
    spoil,
    spoiled,
    table,
    truncated,
    when,
    zero,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _of(name: str, change: Any) -> Behaviour:
    """An operand is changed before it is used."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        return call.sound() if x is None or not x.is_floating_point() else call.sound(**{name: change(x)})

    return behave


def _flushed(x: torch.Tensor) -> torch.Tensor:
    """fp16's subnormals are normal numbers of fp32, which nothing may flush."""
    return torch.where((x.abs() < 2.0**-14) & (x.dtype == torch.float16), torch.zeros_like(x), x)


def _capped(limit: float) -> Any:
    return lambda x: x.clamp(-limit, limit)


def _infinite_lost(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isinf(), torch.full_like(x, torch.nan), x)


def _overflowing_gradient(call: Call) -> Any:
    """The polynomial inside tanh overflows, and Inf times 0 is NaN."""
    made, x = call.sound(), operand(call, "x")
    if x is not None and made.dx is not None and x.shape == made.dx.shape and call["kind"] in ("gelu", "qgelu"):
        made.dx.masked_fill_(x.float().abs() > 1e10, torch.nan)
    return made


def _by_difference(call: Call) -> Any:
    """mean(x^2) - mean^2 in fp32."""
    made, x = call.sound(), call["x"]
    if call["quantizer"] is not None or call["residual"] is not None or not x.numel():
        return made
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    rstd = ((x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0) + call["eps"]).rsqrt()
    gamma = call["gamma"].float() + (1.0 if call["zero_centered_gamma"] else 0.0)
    y = (x - mean) * rstd * gamma
    made.y.copy_(y if call["beta"] is None else y + call["beta"].float())
    made.rstd.copy_(rstd.squeeze(-1))
    return made


def _rms(call: Call, mean_square: torch.Tensor) -> Any:
    made = call.sound()
    if call["quantizer"] is not None or call["residual"] is not None or not call["x"].numel():
        return made
    rstd = (mean_square + call["eps"]).rsqrt()
    gamma = call["gamma"].float() + (1.0 if call["zero_centered_gamma"] else 0.0)
    made.y.copy_(call["x"].float() * rstd * gamma)
    made.rstd.copy_(rstd.squeeze(-1))
    return made


def _squares_in_bf16(call: Call) -> Any:
    return _rms(call, call["x"].float().square().bfloat16().float().mean(-1, keepdim=True))


def _squares_in_own_dtype(call: Call) -> Any:
    return _rms(call, call["x"].square().float().mean(-1, keepdim=True))


def _sums_in_own_dtype(call: Call) -> Any:
    return _rms(call, call["x"].float().square().mean(-1, keepdim=True).to(call["x"].dtype).float())


def _softmax(call: Call, exp: Any) -> Any:
    if call["mask"] is not None or call["causal"] or not call["x"].numel():
        return call.sound()
    z = call["x"].float() * call["scale"]
    e = exp(z - z.amax(-1, keepdim=True))
    return call.delivered((e / e.sum(-1, keepdim=True)).to(call["out_dtype"] or call["x"].dtype))


def _exp_in_bf16(call: Call) -> Any:
    return _softmax(call, lambda z: z.exp().bfloat16().float())


def _cheap_exp(call: Call) -> Any:
    """2^x by a parabola on the fraction, as fast-math tables do."""

    def exp(z: torch.Tensor) -> torch.Tensor:
        t = z * math.log2(math.e)
        whole = t.floor()
        part = t - whole
        return torch.exp2(whole) * (1 + part * (0.6565 + 0.3435 * part))

    return _softmax(call, exp)


def _powers_in_fp32(call: Call) -> Any:
    """1 - beta1^step in fp32, one multiplication after the other; the quotient is moved to the learning rate."""
    if not call["bias_correction"] or not call["beta1"] or call["step"] < 1:
        return call.sound()
    power = torch.full((call["step"],), call["beta1"], device="cpu").cumprod(0)[-1]
    wrong = float(1 - power)
    right = 1 - call["beta1"] ** call["step"]
    return call.sound(lr=call["lr"] * right / wrong) if wrong else call.sound()


def _running_sum(call: Call) -> Any:
    """dgamma, one row after the other in the operand's dtype."""
    made, x, dy = call.sound(), call["x"], call["dy"]
    terms = (dy.float() * x.float() * call["rstd"].unsqueeze(-1)).reshape(-1, x.shape[-1])
    total = torch.zeros(x.shape[-1], dtype=torch.bfloat16, device=x.device)
    for row in terms[:256]:
        total = (total.float() + row).bfloat16()
    made.dgamma.copy_(total + terms[256:].sum(0))
    return made


def _scaled_by_zero(call: Call) -> Any:
    """Takes a shortcut for scale 0, where Inf and NaN must stay NaN."""
    made = call.sound()
    for source, target in zip(call["inputs"], call["outputs"]):
        if call["scale"] == 0.0:
            target.zero_()
        else:
            target.copy_(torch.where(source.isnan(), torch.zeros_like(target), target))
    return made


def _flag_above_zero(call: Call) -> Any:
    """Takes a flag for set where it is 1, not where it is not 0."""
    flag = call["noop_flag"]
    return call.sound(noop_flag=None if flag is None else (flag == 1).to(flag.dtype))


def _flag_unset_by_nan(call: Call) -> Any:
    flag = call["noop_flag"]
    return call.sound(noop_flag=None if flag is None else (flag > 0).to(flag.dtype))


def _finite_gradients(call: Call) -> Any:
    """Skips what is not finite among the gradients."""
    return call.sound(grads=[torch.nan_to_num(g, posinf=0.0, neginf=0.0) for g in call["grads"]])


def _drops_by_multiplying(call: Call) -> Any:
    """0 times Inf or NaN is NaN, where a dropped element must be 0."""
    made = call.sound()
    if made.mask is not None:
        x = call["x"].float() if call["bias"] is None else call["x"].float() + call["bias"]
        lost = (made.mask == 0) & ~x.isfinite()
        made.out.masked_fill_(lost, torch.nan)
    return made


def _drops_gradient_by_multiplying(call: Call) -> Any:
    made, mask = call.sound(), call["mask"]
    return made if mask is None else made.masked_fill_((mask == 0) & ~call["dy"].isfinite(), torch.nan)


def _weighs_dropped(call: Call) -> Any:
    """Reads row 0 for a dropped choice and multiplies it by 0."""
    made, row_map = call.sound(), call["row_map"]
    if call["x"].shape[0] and made.numel():
        bad = (row_map < 0).any(1) & ~call["x"][0].isfinite().all()
        made.masked_fill_(bad.unsqueeze(-1), torch.nan)
    return made


def _skips_improbable(call: Call) -> Any:
    """Takes a choice of probability 0 for dropped, where 0 times Inf must be NaN."""
    probs, row_map = call["probs"], call["row_map"]
    if probs is None or probs.shape != row_map.shape:
        return call.sound()
    return call.sound(row_map=torch.where(probs == 0, torch.full_like(row_map, -1), row_map))


def _masks_by_adding(call: Call) -> Any:
    """Adds -10,000 to masked scores instead of leaving them out."""
    mask = call["mask"]
    if mask is None or call["causal"]:
        return call.sound()
    z = call["x"].float() * call["scale"] - 10000.0 * mask.float()
    made = torch.softmax(z, -1).masked_fill(mask.broadcast_to(z.shape).all(-1, keepdim=True), 0.0)
    return call.delivered(made.to(call["out_dtype"] or call["x"].dtype))


def _skips_zeros(call: Call) -> Any:
    """Takes products with 0 for 0, where 0 times Inf is NaN."""
    b = operand(call, "b")
    return call.sound() if b is None else call.sound(b=torch.nan_to_num(b))


def _reads_given_out(call: Call) -> Any:
    """Multiplies what `out` holds by 0 and adds it, NaN and all."""
    out, made = operand(call, "out"), None
    bad = None if out is None or call["accumulate"] else ~out.detach().isfinite()
    made = call.sound()
    if bad is not None and isinstance(made.out, torch.Tensor):
        made.out.detach().masked_fill_(bad, torch.nan)
    return made


def _zeroes_signed(call: Call) -> Any:
    """-0 becomes +0 on the way."""
    made = call.sound()
    spoil(made, all_of, lambda values: values + 0.0)
    return made


_NORMS = (
    *table("layernorm_fwd", {
        "variance_by_difference": ("computes mean(x^2) - mean(x)^2", _by_difference),
        "layernorm_saturates": ("clamps x at 1e4 before it squares", _of("x", _capped(1e4))),
        "layernorm_loses_nan": ("gives 0 where a row holds NaN", spoiled("y", change=nan_lost)),
        "layernorm_truncates": ("cuts bits off instead of rounding", spoiled("y", change=truncated)),
    }),
    *table("rmsnorm_fwd", {
        "rms_squares_in_bf16": ("rounds squares to bf16", _squares_in_bf16),
        "rms_squares_in_own_dtype": ("squares in x's dtype", _squares_in_own_dtype),
        "rms_mean_in_own_dtype": ("rounds the mean of squares to x's dtype", _sums_in_own_dtype),
        "rms_saturates": ("clamps x at 1e4 before it squares", _of("x", _capped(1e4))),
        "rms_loses_nan": ("gives 0 where a row holds NaN", spoiled("y", change=nan_lost)),
        "rms_truncates": ("cuts bits off instead of rounding", spoiled("y", change=truncated)),
    }),
    *table("rmsnorm_bwd", {"rms_dgamma_in_bf16": ("adds rows one by one in bf16", _running_sum)}),
    *table("layernorm_bwd", {"layernorm_gradient_truncates": (
        "cuts bits off instead of rounding", spoiled("dx", change=truncated))}),
)  # fmt: skip

_ACTIVATIONS = (
    *table("activation_fwd", {
        "activation_loses_nan": ("gives 0 for NaN", spoiled("out", change=nan_lost)),
        "activation_truncates": ("cuts bits off instead of rounding", spoiled("out", change=truncated)),
        "activation_flushes_inputs": ("takes fp16's subnormals for 0", _of("x", _flushed)),
        "activation_overflows": ("clamps its input at 100", _of("x", _capped(100.0))),
        "clamp_hides_nan": ("clamps NaN to the limit", when(
            given(kind="clamped_swiglu"), _of("x", lambda x: torch.nan_to_num(x, nan=7.0)))),
        "activation_computes_in_own_dtype": ("rounds to the operand's dtype between two steps", when(
            given(kind=("swiglu", "geglu", "qgelu", "srelu")), lambda call: _twice_rounded(call))),
    }),
    *table("activation_bwd", {
        "gradient_overflows_for_large_inputs": ("gives NaN beyond |x| = 1e10", _overflowing_gradient),
        "activation_gradient_loses_nan": ("gives 0 for NaN", spoiled("dx", change=nan_lost)),
        "activation_gradient_truncates": ("cuts bits off", spoiled("dx", change=truncated)),
        "activation_gradient_saturates": ("clamps x at 100", _of("x", _capped(100.0))),
    }),
)  # fmt: skip


def _twice_rounded(call: Call) -> Any:
    x = operand(call, "x")
    if x is None or call["quantizer"] is not None or x.dtype == torch.float32:
        return call.sound()
    made = call.sound()
    fine = call.sound(out_dtype=x.dtype)
    made.out.copy_((fine.out.float() * 1.00390625).to(x.dtype).float() * 0.99609375)
    return made


_OTHERS = (
    *table("softmax_fwd", {
        "softmax_exponentiates_in_bf16": ("rounds exponentials to bf16", _exp_in_bf16),
        "softmax_exponentiates_by_parabola": ("takes exp from a cheap table", _cheap_exp),
        "softmax_masks_by_adding": ("adds -10,000 to masked entries", _masks_by_adding),
        "softmax_loses_nan": ("gives 0 in rows that hold NaN", spoiled(change=nan_lost)),
        "softmax_truncates": ("cuts bits off instead of rounding", spoiled(change=truncated)),
        "softmax_saturates_inputs": ("clamps x at 1e3", _of("x", _capped(1e3))),
    }),
    *table("softmax_bwd", {
        "softmax_gradient_loses_nan": ("gives 0 where dy is NaN", spoiled(change=nan_lost)),
        "softmax_gradient_truncates": ("cuts bits off", spoiled(change=truncated)),
    }),
    *table("rope_fwd", {
        "rope_truncates": ("cuts bits off instead of rounding", spoiled(change=truncated)),
        "rope_loses_nan": ("gives finite numbers for NaN", spoiled(change=finite)),
        "rope_takes_angles_in_bf16": ("rounds angles to bf16", _of("freqs", lambda f: f.bfloat16().to(f.dtype))),
    }),
    *table("dropout_add_fwd", {"drops_by_multiplying": ("gives NaN for a dropped Inf", _drops_by_multiplying)}),
    *table("dropout_add_bwd", {
        "drops_gradients_by_multiplying": ("gives NaN for a dropped Inf", _drops_gradient_by_multiplying)}),
    *table("multi_tensor_adam", {
        "adam_skips_infinite_gradients": ("takes gradients that are not finite for 0", _finite_gradients),
        "adam_compares_flag_with_1": ("steps where the flag is neither 0 nor 1", _flag_above_zero),
        "adam_takes_nan_flag_for_unset": ("steps where the flag is NaN", _flag_unset_by_nan),
        "adam_takes_powers_in_fp32": ("computes 1 - beta^step in fp32", _powers_in_fp32),
    }),
    *table("multi_tensor_l2norm", {
        "l2norm_skips_infinities": ("takes what is not finite for 0", changing(
            tensors=lambda call: [torch.nan_to_num(t, posinf=0.0, neginf=0.0) for t in call["tensors"]])),
    }),
    *table("multi_tensor_scale", {"scale_hides_nan": ("writes 0 for NaN, and for all where the scale is 0",
                                                      _scaled_by_zero)}),
    *table("moe_unpermute", {
        "unpermute_weighs_dropped_choices": ("multiplies row 0 by 0 for a dropped choice", _weighs_dropped),
        "unpermute_skips_improbable_choices": ("drops choices of probability 0", _skips_improbable),
        "unpermute_truncates": ("cuts bits off instead of rounding", spoiled(change=truncated)),
    }),
    *table("gemm", {
        "product_skips_zeros": ("takes 0 times Inf for 0", _skips_zeros),
        "product_reads_given_out": ("adds 0 times what `out` holds", _reads_given_out),
        "product_truncates": ("cuts bits off instead of rounding", spoiled("out", change=truncated)),
        "product_flushes_inputs": ("takes fp16's subnormals for 0", _of("a", _flushed)),
    }, on="matmul"),
    *table("attention_fwd", {
        "attention_loses_nan": ("gives 0 for NaN", spoiled("out", change=nan_lost)),
        "attention_gives_no_infinite_lse": ("gives 0 as the log-sum-exp of a row without keys", spoiled(
            "lse", change=lambda v: torch.where(v.isinf(), torch.zeros_like(v), v))),
    }, on="unfused_attention"),
    *table("attention_bwd", {
        "attention_gradient_truncates": ("cuts bits off", spoiled("dq", change=truncated)),
        "attention_gradient_loses_nan": ("gives 0 for NaN", spoiled("dk", change=nan_lost)),
    }, on="unfused_attention_bwd"),
    *table("compute_amax", {
        "amax_skips_infinities": ("leaves Inf out of the maximum", _of("x", lambda x: torch.nan_to_num(
            x, nan=0.0, posinf=0.0, neginf=0.0))),
        "amax_flushes_subnormals": ("takes fp16's subnormals for 0", _of("x", _flushed)),
    }),
    *table("dequantize", {
        "dequantize_flushes": ("writes 0 for fp16's subnormals", spoiled(change=_flushed)),
        "dequantize_loses_nan": ("writes 0 for NaN", spoiled(change=nan_lost)),
        "dequantize_drops_the_sign_of_zero": ("writes +0 for -0", _zeroes_signed),
    }),
    *table("moe_unpermute_bwd", {"unpermute_gradient_of_probabilities_is_zero": (
        "returns 0 as the gradient of probabilities", spoiled("dprobs", change=zero))}),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_NORMS, *_ACTIVATIONS, *_OTHERS)
