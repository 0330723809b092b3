# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention in float64, and how far off an implementation may be. Formulas: `te_dispatch.ops.attention`.

What is asked of an implementation, and what it may do:

- Products of 16-bit operands are exact in fp32. fp32 operands may be multiplied as three TF32 products, hi hi + hi lo +
  lo hi: hi errs by 2^-11, lo, truncated, by 2^-10 of that, and lo lo is left out, together 2^-20 + 2^-22 (`PRODUCT`).
  One TF32 product (2^-10) is not fp32.
- Accumulators may truncate, as matrix units do: an addition errs by 2 u32 (`STEP`).
- Logits stay in fp32. exp may be computed as 2^(x log2 e), which rounds the product. It errs by 2 ulp itself where
  operands are fp32. Where they are 16-bit numbers, what it gives is rounded to 16 bits next, and kernels compute it to
  few more (PyTorch's own for CPUs errs by 2^-14.2): a quarter of fp16's u, 2^-13, is asked for. That is what the
  log-sum-exp shows.
- p is rounded to the operands' dtype before it multiplies v, and so is the gradient of z before it multiplies k and q,
  and the gradients of a group's heads before they are added: u of the dtype each. This is what every kernel on matrix
  units does. The gradient of z may be made of that rounded p (PyTorch's memory-efficient kernel keeps p in the
  operands' dtype only), whose rounding errs by half a subnormal in fp16 where a weight is small. With fp32 operands the
  same terms are u32.
- Rows are normalized before, or after the product with v; blocks of columns may be rescaled as the maximum grows (once
  per column at most). The backward may recompute p from q, k and the log-sum-exp, and the row sums of p dp as
  dout . out, with the rounded out.

- Where the output is asked wider than the operands, it may be rounded to their dtype first, and its gradient likewise
  when the backward takes it: fused kernels have one dtype for all.

An error tau of a logit is a relative error e^tau - 1 of its weight. Everything else is running error analysis
(`te_dispatch.conformance.bounds.known`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from te_dispatch.conformance.bounds import U32, UNIT
from te_dispatch.conformance.bounds.elementary import TWO_ULP, tanh
from te_dispatch.conformance.bounds.gemm import PROMOTED, U14
from te_dispatch.conformance.bounds.known import FLUSH, Known, gamma
from te_dispatch.conformance.spread import Spread

STEP = 2 * U32
#: Relative error of a product of fp32 operands.
PRODUCT = 2.0**-20 + 2.0**-22
#: Relative error of exp with 16-bit operands.
NARROW_EXP = 2.0**-13
#: Below, a number is the flushed results of sums over nothing: masked, and 0 in every dtype.
_NOTHING = 2.0**-100


def _dot(a: Known, b: Known, wide: bool) -> Known:
    """a (..., n, k) times b (..., k, m), accumulated in fp32; `wide` where a factor is no 16-bit number."""
    k = a.value.shape[-1]
    magnitude = a.largest @ b.largest
    error = a.error @ b.largest + a.value.abs() @ b.error
    return Known(a.value @ b.value, error + (gamma(k, STEP) + (PRODUCT if wide else 0.0)) * magnitude + k * FLUSH)


@dataclass(frozen=True)
class Forward:
    """What a forward computes, per (b, h, s_q, ...).

    Attributes:
        call: the operands.
        wide: whether operands are not 16-bit numbers.
        unit: u of the operands' dtype.
        z: logits; 0 where masked.
        slope: of the cap, dz / d(c q.k); None without one.
        p: probabilities as they are recomputed; 0 where masked.
        share: (b, h, s_q, 1), the offset's share of each row; None for vanilla.
        lse: (b, h, s_q, 1), 0 where fully masked. empty: there.
        weights: what multiplies v: p after dropout, as the operands' dtype or a cast leaves it.
        out: (b, h, s_q, d_v), before its own rounding.
    """

    call: Spread
    wide: bool
    unit: float
    z: Known
    slope: Known | None
    p: Known
    share: Known | None
    lse: Known
    empty: torch.Tensor
    weights: Known
    out: Known
    keep: torch.Tensor | None

    @property
    def max_logit(self) -> Known:
        """(h,), 0 where a head has no unmasked logit. The maximum errs as the logits that may attain it."""
        shape = self.z.value.shape
        hidden = self.call.hidden.expand(shape)
        ends = [torch.where(hidden, -torch.inf, self.z.value + way * self.z.error) for way in (-1.0, 0.0, 1.0)]
        low, value, high = (_max(end.transpose(0, 1).flatten(1)) for end in ends)
        absent = value == -torch.inf
        error = torch.maximum(value - low, high - value)
        return Known(torch.where(absent, 0.0, value), torch.where(absent, 0.0, error))


def _max(x: torch.Tensor) -> torch.Tensor:
    return x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], -torch.inf)


def logits(call: Spread, wide: bool, units: bool = False) -> tuple[Known, Known | None]:
    """z, and the cap's slope; `units` where FP8 matrix units multiply, which cut products off (`bounds.gemm`)."""
    q, k = Known.exactly(call.q), Known.exactly(call.per_head(call.k).transpose(-1, -2))
    z = _dot(q, k, wide)
    if units and q.value.shape[-1]:
        largest = q.largest.amax(-1, keepdim=True) * k.largest.amax(-2, keepdim=True)
        z = Known(z.value, z.error + min(q.value.shape[-1], PROMOTED) * U14 * largest)
    z = z * call.scale  # the scale may as well multiply q
    bias = None if call.bias is None else Known(call.bias, 4 * U32 * call.bias.abs())
    if bias is not None and call.early:
        z = z + bias * call.scale
    slope = None
    if call.cap > 0:
        capped = tanh(z * (1.0 / call.cap))
        slope = _one_minus_square(capped)
        z = capped * call.cap
    if bias is not None and not call.early:
        z = z + bias
    return z.part(~call.hidden), slope


def _one_minus_square(t: Known) -> Known:
    value = 1 - t.value.square()
    return Known(value, 2 * t.error * t.largest + 2 * U32)


def forward(call: Spread, dtype: torch.dtype, keep: torch.Tensor | None = None, units: bool = False) -> Forward:
    """Everything but casts.

    Args:
        dtype: the operands' (float32 for records, whose products with a scale are no 16-bit numbers).
        keep: bool (b, h, s_q, s_kv), which elements of p dropout keeps; None for all.
        units: as in `logits`.
    """
    wide, unit = dtype == torch.float32, UNIT[dtype]
    of_exp = TWO_ULP if wide else NARROW_EXP
    z, slope = logits(call, wide, units)
    shown = ~call.hidden.expand(z.value.shape)
    columns = z.value.shape[-1]
    open_z = torch.where(shown, z.value, -torch.inf)
    top = open_z.amax(-1, keepdim=True) if columns else z.value.new_full((*z.value.shape[:-1], 1), -torch.inf)
    empty = top == -torch.inf
    top = torch.where(empty, 0.0, top)
    sink = None if call.sink is None else call.sink.expand_as(top)
    shift = top if sink is None else torch.maximum(top, sink)
    weight = torch.exp(open_z - shift)
    at_sink = torch.zeros_like(top) if sink is None else torch.exp(sink - shift)
    total = torch.where(empty, 1.0, weight.sum(-1, keepdim=True) + at_sink)
    p = weight / total
    # exp's argument is rounded, and so is its product with log2 e: 4 u32 of both numbers that are subtracted.
    relative = torch.expm1((z.error + 4 * U32 * (z.value.abs() + shift.abs()) + of_exp).clamp_max(60.0))
    share = at_sink / total
    sink_error = 0.0 if sink is None else 4 * U32 * (sink.abs() + shift.abs()) + of_exp
    of_total = (p * relative).sum(-1, keepdim=True) + share * sink_error + gamma(columns + 2, STEP) + gamma(columns)
    of_total = of_total.clamp_max(0.5)
    lse_value = torch.where(empty, 0.0, shift + torch.log(total))
    lse_error = -torch.log1p(-of_total) + 8 * U32 * (1 + shift.abs() + lse_value.abs())
    lse = Known(lse_value, torch.where(empty, 0.0, lse_error))
    # Normalized by the sum, or recomputed from lse: the latter's error is the larger one.
    again = torch.expm1((z.error + lse.error + 4 * U32 * (z.value.abs() + lse_value.abs()) + of_exp).clamp_max(60.0))
    ratio = torch.maximum((relative + of_total) / (1 - of_total) + 2 * STEP, again)
    found = Known(p, p * ratio + torch.where(shown & ~empty, FLUSH, 0.0))
    again = torch.expm1(sink_error + lse.error + of_exp) if sink is not None else torch.zeros_like(top)
    offset = (
        None if sink is None else Known(torch.where(empty, 0.0, share), torch.where(empty, 0.0, share * again + FLUSH))
    )
    # The output is normalized by the sum, which has no error of a logarithm in it.
    used = Known(p, p * ((relative + of_total) / (1 - of_total) + 2 * STEP) + torch.where(shown & ~empty, FLUSH, 0.0))
    weights = narrowed(kept(used, keep, call.dropout_p), unit)
    out = _dot(weights, Known.exactly(call.per_head(call.v)), wide)
    out = Known(out.value, out.error + gamma(columns) * out.largest).part(~empty)
    return Forward(call, wide, unit, z, slope, found, offset, lse, empty, weights, out, keep)


def kept(x: Known, keep: torch.Tensor | None, dropout_p: float) -> Known:
    """x where kept, divided by 1 - p."""
    return x if keep is None else (x * (1.0 / (1.0 - dropout_p))).part(keep)


def narrowed(x: Known, unit: float, nothing: float = _NOTHING) -> Known:
    """Rounded to the operands' dtype, whose smallest numbers (fp16's) are finer than FLUSH only in fp32's range."""
    smallest = {UNIT[torch.float16]: 2.0**-25}.get(unit, FLUSH)
    return Known(x.value, torch.where(x.largest > nothing, x.error + unit * x.largest + smallest, x.error))


def taken(dout: torch.Tensor, unit: float) -> Known:
    """The output's gradient, which may be rounded to the operands' dtype where that does not hold it."""
    dtype = {UNIT[torch.bfloat16]: torch.bfloat16, UNIT[torch.float16]: torch.float16}.get(unit)
    held = dtype is None or torch.equal(dout.to(dtype).double().nan_to_num(), dout.nan_to_num())
    return Known.exactly(dout) if held else narrowed(Known.exactly(dout), unit)


def with_weights(made: Forward, weights: Known) -> Forward:
    """The forward whose p, after dropout, went through a cast."""
    columns = weights.value.shape[-1]
    out = _dot(weights, Known.exactly(made.call.per_head(made.call.v)), True)
    out = Known(out.value, out.error + gamma(columns) * out.largest).part(~made.empty)
    return replace(made, weights=weights, out=out, wide=True)


@dataclass(frozen=True)
class Backward:
    """dq (b, h, s_q, d), dk, dv (b, g, s_kv, ...), before their own rounding; dz; ds, what multiplies k and q."""

    dq: Known
    dk: Known
    dv: Known
    dz: Known
    ds: Known
    dsoftmax_offset: Known | None


def score_gradients(made: Forward, dout: torch.Tensor, out_unit: float) -> tuple[Known, Known, Known]:
    """dz = p (dp - sum_j p dp), the row sums, and dz through the cap.

    The row sums may be taken of p dp, or of dout . out with out rounded to its dtype (`out_unit`).
    """
    call = made.call
    do, v = taken(dout, made.unit), Known.exactly(call.per_head(call.v).transpose(-1, -2))
    dp = kept(_dot(do, v, made.wide), made.keep, call.dropout_p)
    of_p = made.p * dp
    along = of_p.sum(-1, keepdim=True)
    along = Known(along.value, along.error + gamma(of_p.value.shape[-1], U32) * of_p.largest.sum(-1, keepdim=True))
    rounded = narrowed(made.out, out_unit)
    products = (do.largest * (rounded.error + gamma(dout.shape[-1], STEP) * rounded.largest)).sum(-1, keepdim=True)
    products = products + (do.error * rounded.value.abs()).sum(-1, keepdim=True)
    row = Known(along.value, torch.maximum(along.error, products + dout.shape[-1] * FLUSH))
    # The scale of dq and dk may multiply any of the factors, and a result below fp32's normal numbers be lost then.
    lost = FLUSH / min(abs(call.scale) or 1.0, 1.0)
    dz = narrowed(made.p, made.unit) * (dp - row)
    dz = Known(dz.value, dz.error + lost * (1 + (dp - row).largest)).part(~call.hidden & ~made.empty)
    return dz, row, dz if made.slope is None else (dz * made.slope).part(dz.largest > 0)


def backward(made: Forward, dout: torch.Tensor, out_unit: float) -> tuple[Backward, Known]:
    """Gradients without casts, and the gradient of z before it was narrowed."""
    dz, row, capped = score_gradients(made, dout, out_unit)
    ds = narrowed(capped, made.unit)
    offset = None
    if made.share is not None:
        terms = -(made.share * row)
        total = Known(terms.value[..., 0], terms.error[..., 0]).sum((0, 2))
        n = terms.value.shape[0] * terms.value.shape[2]
        offset = Known(total.value, total.error + gamma(n, U32) * terms.largest.sum((0, 2, 3)))
    return products(made, dout, backward_weights(made), ds, dz, offset), capped


def backward_weights(made: Forward) -> Known:
    """p after dropout, recomputed."""
    return narrowed(kept(made.p, made.keep, made.call.dropout_p), made.unit)


def products(made: Forward, dout: torch.Tensor, weights: Known, ds: Known, dz: Known, offset: Known | None) -> Backward:
    """What the three matrix products make of the weights and of ds."""
    call = made.call
    k, q = Known.exactly(call.per_head(call.k)), Known.exactly(call.q)
    dq = _dot(ds, k, made.wide) * call.scale
    dk = _grouped(made, _dot(_turned(ds), q, made.wide) * call.scale)
    dv = _grouped(made, _dot(_turned(weights), taken(dout, made.unit), made.wide))
    return Backward(dq, dk, dv, dz, ds, offset)


def _turned(x: Known) -> Known:
    return Known(x.value.transpose(-1, -2), x.error.transpose(-1, -2))


def _grouped(made: Forward, x: Known) -> Known:
    """The sum over the heads of a group, each rounded to the operands' dtype before."""
    share = made.call.heads // made.call.groups
    if share == 1:
        return x
    each = narrowed(x, made.unit)
    magnitude = made.call.per_group(each.largest)
    return Known(made.call.per_group(each.value), made.call.per_group(each.error) + gamma(share, STEP) * magnitude)


def bias_gradient(made: Forward, found: Backward, capped: Known, shape: tuple[int, ...]) -> Known:
    """Of a bias (1 or b, 1 or h, s_q, s_kv): dz, or c dz through the cap for one before the scale, summed over the
    dimensions that it broadcasts along; each term may be rounded to the operands' dtype before, as what dq and dk are
    made of: multiplied by the scale, too, which is divided out again. fp16 holds no more than multiples of 2^-24.
    """
    grad = capped * made.call.scale if made.call.early else found.dz
    over = [axis for axis in (0, 1) if shape[axis] == 1]
    scale = 1.0 if made.call.early else min(abs(made.call.scale) or 1.0, 1.0)
    smaller = narrowed(Known(grad.value * scale, grad.error * scale), made.unit, 0.0)  # what is masked is an exact 0
    each = Known(grad.value, smaller.error / scale)
    if not over:
        return each
    n = 1
    for axis in over:
        n *= grad.value.shape[axis]
    total = Known(each.value.sum(over, keepdim=True), each.error.sum(over, keepdim=True))
    return Known(total.value, total.error + gamma(n, STEP) * each.largest.sum(over, keepdim=True))
