# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add, optimizer steps, norms and mixture-of-experts as values known within a bound."""

from __future__ import annotations

from typing import NamedTuple, Union

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.known import FLUSH, Known


def quotient(a: Known, b: Known) -> Known:
    """a / b for b > 0, where it is computed as such or by an approximate reciprocal: 2 ulp."""
    value = a.value / b.value
    error = (a.error + value.abs() * b.error) / (b.value - b.error).clamp_min(FLUSH)
    return Known(value, error).rounded(4.0)


def square_root(x: Known) -> Known:
    """Of x >= 0; the root of the ends of x's interval, and 1 ulp."""
    value = x.value.sqrt()
    error = torch.maximum((x.value + x.error).sqrt() - value, value - (x.value - x.error).clamp_min(0).sqrt())
    return Known(value, error).rounded(2.0)


def dropout_add(
    x: torch.Tensor,
    bias: Union[torch.Tensor, None],
    residual: Union[torch.Tensor, None],
    keep: Union[torch.Tensor, None],
    dropout_p: float,
) -> Known:
    """residual + keep (x + bias) / (1 - p): two sums and a product in fp32; what is dropped is exactly 0."""
    y = Known.read(x)
    if bias is not None:
        y = y + Known.read(bias.expand_as(x))
    if keep is not None:
        y = (y * (1.0 / (1.0 - dropout_p))).part(keep)
    return y if residual is None else y + Known.read(residual)


#: Where a square, or a sum of squares, is larger, it may overflow in fp32.
LARGEST_SQUARE = 2.0**126


class Adam(NamedTuple):
    """After a step: the weights (master's, where there is one), and both moments. Where `overflowed`, the second
    moment may be infinite, and the weights then are `unmoved` but for their decay."""

    weights: Known
    exp_avg: Known
    exp_avg_sq: Known
    overflowed: torch.Tensor
    unmoved: Known


def adam(
    weights: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float,
    adam_w: bool,
    bias_correction: bool,
) -> Adam:
    """m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, w -= lr (m / c1) / (sqrt(v / c2) + eps), in fp32.

    Hyperparameters are fp32 numbers, and 1 - beta may be taken in fp32, which errs by u32 absolutely: 2^-14 of 1 -
    0.999. c = 1 - beta^step is that of float64, rounded once. m may be interpolated, m + (1 - beta1) (g - m), which
    rounds terms of size |m| + |g|. Moments are used before or after they are stored, which is one rounding.
    """
    w, g = Known.read(weights), Known.read(grad)
    if not adam_w:
        g = g + w * weight_decay
    m = _average(Known.read(exp_avg), g, beta1)
    v = _average(Known.read(exp_avg_sq), g * g, beta2)
    c1, c2 = (_correction(beta, step) if bias_correction else Known.exactly(torch.ones(1)) for beta in (beta1, beta2))
    update = quotient(quotient(m, c1), square_root(quotient(v, c2)) + eps)
    unmoved = w
    if adam_w:
        update = update + w * weight_decay
        unmoved = w - w * weight_decay * lr
    return Adam(w - update * lr, m, v, g.value.square() > LARGEST_SQUARE, unmoved)


def _average(old: Known, new: Known, beta: float) -> Known:
    share = Known(torch.full_like(new.value, 1 - beta), torch.full_like(new.value, 2 * U32))
    found = old * beta + new * share
    return Known(found.value, found.error + 3 * U32 * (1 - beta) * (old.largest + new.largest))


def _correction(beta: float, step: int) -> Known:
    return Known.exactly(torch.full((1,), 1 - beta**step, dtype=torch.float64)).rounded()


def norm(tensors: list[torch.Tensor]) -> Known:
    """sqrt(sum x^2) over all elements, (1,): the sum's error is gamma(n) of itself, which the root halves. Norms may be
    taken tensor by tensor, and of those again: each root and square is a rounding, and there are three of each."""
    flat = torch.cat([x.double().flatten() for x in tensors])
    squares = Known.read(flat)
    total = (squares * squares).sum(0, keepdim=True)
    return square_root(total.rounded(3.0)).rounded(3.0)


def unpermute(rows: torch.Tensor, weights: Union[torch.Tensor, None]) -> Known:
    """The sum over the choices (T, top_k, K), each times its probability (T, top_k), in fp32."""
    terms = Known.read(rows)
    if weights is not None:
        terms = terms * Known.read(weights[..., None].expand_as(rows))
    return terms.sum(1)
