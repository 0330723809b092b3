# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products as values known within a bound."""

from __future__ import annotations

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.known import Known, gamma

#: How sums over k are accumulated: in fp32; on FP8 units without and with promotion of partial sums.
MODES = ("fp32", "fast", "split")

#: FP8 units of the sm_90 generation align products and accumulator to the largest of them and cut 14 bits off, so each
#: product errs by up to one unit of the 14th: 2^-13. Measured there: 7e-2 at k = 4096 and one sign, 6e-4 split.
#: They align by the codes' exponent fields, which of a subnormal code are those of the smallest normal number. Measured
#: there, in e4m3 without scales: 2^-9 (-8) + 0.0215 (-2^-9) + 0.0176 (-2^-9) is off by 2^-16, a unit of 2^-6 8 2^-13.
U14 = 2.0**-13
#: Partial sums of so many products are promoted to fp32 where accumulation is split.
PROMOTED = 128
#: Integers up to here are exact in fp32.
EXACT = 2.0**24
#: Roundings of a term beyond those of its sum: the product, both operands' scales, and the scales' product.
_EXTRA = 4


def accumulation(k: int, mode: str) -> float:
    """The error of a sum of k products, relative to sum |a| |b|.

    fp32: gamma(k + 4) in units of u32: k - 1 additions in any order, the product (exact for FP8, bf16 and fp16), and
    the scales that were multiplied into operands or sum. TF32 products are not fp32: they err by 2^-11 relative to
    each product, which is as much as this only where k is above 8192.
    fast: each of k products, aligned to an accumulator that is at most sum |a| |b|, errs by 2^-13 of that.
    split: the same within each 128 products, whose own sum of magnitudes is what it is relative to; then fp32.
    """
    return gamma(k + _EXTRA) + _cut(k, mode)


def _cut(k: int, mode: str) -> float:
    """What FP8 units add to that of fp32, relative to the sum of magnitudes that products are aligned by."""
    if mode == "fast":
        return min(k * U14, 1.0)
    return min(k, PROMOTED) * U14 if mode == "split" else 0.0


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    mode: str,
    alone: bool = False,
    aligned: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Known:
    """(m, k) times (k, n), float64 values, each exact.

    `aligned` are the values by whose exponents FP8 units align products, where these are not a and b themselves.

    A product or a partial sum below the normal range of fp32 may be lost: k smallest normal numbers at most. Where all
    operands are integers and no sum of magnitudes exceeds 2^24, every fp32 product and every partial sum in any order
    is exact, so nothing but the exact result is right, if the product is `alone`: neither scaled nor added to, which an
    implementation may do before the sum is complete.
    """
    k = a.shape[1]
    magnitude = a.abs() @ b.abs()
    if alone and mode == "fp32" and _integers(a) and _integers(b) and bool((magnitude <= EXACT).all()):
        return Known.exactly(a @ b)
    cut = _cut(k, mode) * (magnitude if aligned is None else aligned[0].abs() @ aligned[1].abs())
    return Known(a @ b, gamma(k + _EXTRA) * magnitude + cut + (k + 1) * 2.0**-126)


def term(x: torch.Tensor, k: int) -> Known:
    """A bias or an output's old values, (m, n) or (n,), added to a sum over k: before it is complete where accumulators
    start from them, as `torch.addmm` on CPUs has it, so that each addition rounds them too."""
    value = x.double()
    return Known(value, gamma(k + _EXTRA) * torch.where(value.isfinite(), value.abs(), 0.0))


def _integers(x: torch.Tensor) -> bool:
    return bool((x == x.round()).all())


def operand_sum(x: torch.Tensor, dim: int) -> Known:
    """Sums over k of an operand, whose scaled values are rounded to fp32 first where it is a record."""
    return Known(x, U32 * x.abs()).sum(dim)
