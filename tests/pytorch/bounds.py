# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bounds on what float32 arithmetic does to a whole layer, by running error analysis.

A test computes the layer in float64 on `Bounded` numbers: each value goes with a bound on how far a float32
computation of the same formula may be from it, and each step adds to the bound what it rounds and carries along what
came in (Higham, Accuracy and Stability of Numerical Algorithms, 3.3). So no test states a tolerance: its bounds follow
from the lengths of the sums and the magnitudes of the data. With u = 2^-24, half the distance from 1 to the next
float32:

- one operation: u of the magnitude of its result;
- a sum of n terms in any order: n u times the sum of magnitudes (4.2 there); a product of k terms per element
  (k + 1) u, the terms being rounded too;
- an operand that is off by e: |f(x + e) - f(x)|, which for a product is |a| e_b + |b| e_a + e_a e_b.

The bounds hold in the worst case, so they grow with every layer of sums; typical errors are far below.
"""

from __future__ import annotations

import math
from typing import Any

import torch

U = 2.0**-24
#: Half the smallest float32: what a result that underflows is off by.
UNDERFLOW = 2.0**-150
#: How much less the same arithmetic errs in float64; twice, for second orders.
FLOAT64 = 2 * 2.0**-29


class Bounded:
    """A float64 tensor, and a bound, element by element, on the error of its float32 counterpart."""

    def __init__(self, value: torch.Tensor, error: torch.Tensor | float = 0.0) -> None:
        self.value = value.detach().double()
        self.error = torch.as_tensor(error, dtype=torch.float64).expand(self.value.shape)

    @property
    def magnitude(self) -> torch.Tensor:
        """The largest that the float32 counterpart may be."""
        return self.value.abs() + self.error

    def holds(self, got: torch.Tensor) -> bool:
        """Whether the float32 tensor `got`, of another shape if need be, is within the bound everywhere."""
        off = (got.detach().double() - self.value.reshape(got.shape)).abs()
        return bool((off <= self.error.reshape(got.shape)).all())

    def rounded(self, roundings: float = 1, magnitude: torch.Tensor | None = None) -> Bounded:
        """Off by `roundings` more, each of at most u of `magnitude` (None for that of the value)."""
        size = self.magnitude if magnitude is None else magnitude
        return Bounded(self.value, self.error + roundings * (U * size + UNDERFLOW))

    def __add__(self, other: Bounded) -> Bounded:
        return Bounded(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other: Bounded) -> Bounded:
        return self + Bounded(-other.value, other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        carried = self.magnitude * other.magnitude - self.value.abs() * other.value.abs()
        return Bounded(self.value * other.value, carried).rounded()

    def __matmul__(self, other: Bounded) -> Bounded:
        magnitude = self.magnitude @ other.magnitude
        carried = magnitude - self.value.abs() @ other.value.abs()
        return Bounded(self.value @ other.value, carried).rounded(self.value.shape[-1] + 1, magnitude)

    @property
    def T(self) -> Bounded:
        return Bounded(self.value.T, self.error.T)

    def sum(self, dim: int, keepdim: bool = False) -> Bounded:
        magnitude = self.magnitude.sum(dim, keepdim)
        total = Bounded(self.value.sum(dim, keepdim=keepdim), self.error.sum(dim, keepdim))
        return total.rounded(self.value.shape[dim], magnitude)

    def mean(self) -> Bounded:
        """Over the last dimension, which stays."""
        n = self.value.shape[-1]
        total = self.sum(-1, keepdim=True)
        return Bounded(total.value / n, total.error / n).rounded()

    def rsqrt(self) -> Bounded:
        """1 / sqrt. Convex and falling, so it changes most at the lower end; 4 roundings: some units approximate."""
        value = self.value.rsqrt()
        return Bounded(value, (self.value - self.error).rsqrt() - value).rounded(4)


class BoundedNorm:
    """LayerNorm or RMSNorm (``beta`` None) over the last dimension of the rows x (r, n), and its gradients.

    Implementations differ in whether they center before they scale by rstd or after, and in the backward, in whether
    they sum g x or g times the normalized x. Both are covered: where a difference x - mean is taken, the magnitude that
    rounds is |x| + |mean|, with 3 roundings for the factors in front of it.
    """

    def __init__(
        self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float, zero_centered: bool = False
    ) -> None:
        rows, n = Bounded(x), x.shape[-1]
        self.centers = beta is not None
        self.factor = Bounded(gamma) + Bounded(torch.ones_like(gamma)) if zero_centered else Bounded(gamma)
        mean = rows.mean() if self.centers else Bounded(torch.zeros_like(x[:, :1]))
        spread = rows.magnitude + mean.magnitude
        centered = (rows - mean).rounded(3, spread) if self.centers else rows
        variance = (centered * centered).mean()
        self.rstd = Bounded(variance.value + eps, variance.error).rounded().rsqrt()
        self.spread = spread * self.rstd.magnitude
        self.normalized = centered * self.rstd
        self.y = self.normalized * self.factor
        if beta is not None:
            self.y = self.y + Bounded(beta)
        self.n = n

    def backward(self, dy: Bounded) -> tuple[Bounded, Bounded, Bounded]:
        """Gradients of x, gamma and beta.

        dx = rstd (g - mean(g) - normalized mean(g normalized)) with g = dy factor, without mean(g) in RMSNorm. 8
        roundings for what an implementation that expands the parentheses does with its terms.
        """
        g = dy * self.factor
        along = (g * self.normalized).mean()
        along = along.rounded(self.n + 4, (g.magnitude * self.spread).mean(-1, keepdim=True))
        inner = g - self.normalized * along
        size = g.magnitude + self.spread * along.magnitude
        if self.centers:
            average = g.mean()
            inner, size = inner - average, size + average.magnitude
        dx = inner.rounded(8, size) * self.rstd
        return dx, (dy * self.normalized).sum(0), dy.sum(0)


def assert_bounded(got: torch.Tensor, expected: torch.Tensor, bounded: Bounded, what: str = "") -> None:
    """`got` is float32, `expected` its value in float64 by other means (autograd), `bounded` the analysis.

    That both mean the same is checked too: float64 errs in the same ways, 2^-29 as much.
    """
    got, expected, error = (t.detach().double().reshape(bounded.value.shape) for t in (got, expected, bounded.error))
    apart = (bounded.value - expected).abs()
    assert (apart <= FLOAT64 * error).all(), f"{what}: the analysis is of another formula, {apart.max():.3e} apart"
    off = (got - expected).abs()
    assert (off <= error).all(), f"{what}: off by {off.max():.3e}, at most {error[off > error].min():.3e} allowed"


def assert_same_sum(got: torch.Tensor, other: torch.Tensor, terms: torch.Tensor, what: Any = "") -> None:
    """Two float32 sums over the rows of `terms`, in different orders: each within n u of the sum of magnitudes."""
    rows = terms.detach().double().reshape(-1, terms.shape[-1])
    bound = 2 * Bounded(rows).sum(0).error
    off = (got.double() - other.double()).abs()
    assert (off <= bound).all(), f"{what}: {off.max():.3e} apart, at most {bound.min():.3e} allowed"


def deviation_of_std(samples: int) -> float:
    """Five relative standard deviations of the standard deviation of so many normal samples: a chance of 6e-7.

    The variance of n normal samples has the relative variance 2 / (n - 1), its root a quarter of that.
    """
    return 5 * math.sqrt(0.5 / (samples - 1))
