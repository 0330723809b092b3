# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm as values known within a bound."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.known import FLUSH, Known, gamma

#: Roundings of a row's sum beyond its additions: the square, the division by N, and a pairwise merge's factors.
_EXTRA = 4


#: Where the squares of a row sum to more, those of the differences from its mean may overflow in fp32.
LARGEST_SUM = 2.0**125


class Forward(NamedTuple):
    """Results, and the rows (..., 1) whose sum of squares an implementation may find to be infinite."""

    mean: Known
    rstd: Known
    y: Known
    overflowed: torch.Tensor


def factor(weight: torch.Tensor, zero_centered: bool) -> Known:
    """gamma, or 1 + gamma rounded."""
    return Known.read(weight) + 1.0 if zero_centered else Known.read(weight)


def forward(
    x: Known, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool, centered: bool
) -> Forward:
    """With g = gamma(N + 4), q = mean x^2 and v the variance:

    mean: g mean|x|.
    variance: two passes give g v + (error of the mean)^2, Welford's update and pairwise merges g sqrt(q v) (Chan, Golub
    and LeVeque, "Algorithms for computing the sample variance", 1983, section 3). Both are below g sqrt(q v) + g^2 q,
    since v <= q. mean x^2 - mean^2 is not: it may lose everything, and is not what the contract asks for. RMSNorm sums
    terms of one sign: g q.
    rstd: the ends of 1 / sqrt(v + eps), v between its bounds, and 2 ulp of rsqrt; eps is rounded to fp32.
    y: (x - mean) rstd f + beta, or x (rstd f) - mean rstd f, whose terms are rounded apart.
    An error of x itself (a sum with the residual that was rounded the other way) moves mean by its mean and sqrt(v)
    by no more than its root mean square.
    """
    n = x.value.shape[-1]
    g = gamma(n + _EXTRA)
    moved = x.error.square().mean(-1, keepdim=True).sqrt()
    q = x.value.square().mean(-1, keepdim=True)
    if centered:
        mean = Known(x.value.mean(-1, keepdim=True), g * x.largest.mean(-1, keepdim=True) + moved + FLUSH)
        variance = (x.value - mean.value).square().mean(-1, keepdim=True)
        spread = g * (q * variance).sqrt() + g * g * q
    else:
        mean = Known(torch.zeros_like(q), torch.zeros_like(q))
        variance, spread = q, g * q
    spread = spread + 2 * variance.sqrt() * moved + moved.square() + FLUSH
    rstd = _rstd(variance, spread, eps)
    f = factor(weight, zero_centered)
    y = (x * rstd - mean * rstd) * f
    if bias is not None:
        y = y + Known.read(bias)
    return Forward(mean, rstd, y, q * n > LARGEST_SUM)


def _rstd(variance: torch.Tensor, spread: torch.Tensor, eps: float) -> Known:
    value = (variance + eps).rsqrt()
    roundings = 3 * U32
    upper = ((variance - spread).clamp_min(0) * (1 - roundings) + eps * (1 - roundings)).rsqrt()
    lower = ((variance + spread) * (1 + roundings) + eps * (1 + roundings)).rsqrt()
    error = torch.maximum(upper - value, value - lower)
    return Known(value, error + 4 * U32 * upper)


class Backward(NamedTuple):
    dx: Known
    dgamma: Known
    dbeta: Known


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
    add: torch.Tensor | None,
) -> Backward:
    """dx = rstd (g - h mean(g h) - mean(g)) with h = (x - mean) rstd and g = dy f; mean(g) for LayerNorm only.

    h = x rstd - mean rstd may be expanded, in h itself and in the sums (PyTorch's kernel sums g x and g and combines
    them), so errors of h scale with H = (|x| + |mean|) rstd and not with |h|. Then the sums over N features, and over R
    rows for dgamma and dbeta, err by gamma of so many additions, plus the operations of a term. A subnormal x may be
    read as 0, which moves its h by |x| rstd.
    """
    n = x.shape[-1]
    rows = x.numel() // max(n, 1)
    matrix = x.double().reshape(rows, n)
    inverse = rstd.double().reshape(rows, 1)
    shift = torch.zeros_like(inverse) if mean is None else mean.double().reshape(rows, 1)
    h = (matrix - shift) * inverse
    wide = (matrix.abs() + shift.abs()) * inverse
    moved = Known.read(matrix).error * inverse
    grad = Known.read(dy.reshape(rows, n))
    g = grad * factor(weight, zero_centered)
    products = Known(g.value * h, g.error * wide + g.largest * moved + gamma(n + _EXTRA + 2) * g.largest * wide)
    along_h = Known(products.value.mean(-1, keepdim=True), products.error.mean(-1, keepdim=True) + FLUSH)
    inner_error = g.error + wide * along_h.error + moved * along_h.largest
    inner_error = inner_error + 6 * U32 * (wide * along_h.value.abs() + g.largest)
    inner = g.value - h * along_h.value
    if mean is not None:
        average = Known(g.value.mean(-1, keepdim=True), gamma(n + _EXTRA) * g.largest.mean(-1, keepdim=True))
        inner, inner_error = inner - average.value, inner_error + average.error + 4 * U32 * average.value.abs()
    dx = Known(inverse * inner, inverse * inner_error).rounded(2.0)
    if add is not None:
        dx = dx + Known.read(add.reshape(rows, n))
    terms = Known(grad.value * h, grad.error * wide + grad.largest * moved + 4 * U32 * grad.value.abs() * wide + FLUSH)
    # Expanded too: the sums of dy x rstd and of dy mean rstd are as large as `wide` makes them.
    slack = gamma(rows) * (grad.value.abs() * wide).sum(0)
    dgamma = terms.sum(0)
    dgamma = Known(dgamma.value, dgamma.error + slack)
    return Backward(dx.reshape(*x.shape), dgamma, grad.sum(0))
