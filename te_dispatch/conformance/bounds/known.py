# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Numbers that an implementation computes in fp32: what they are exactly, and how far off it may be.

This is running error analysis (Wilkinson; Higham, section 3.3): every operation adds its own rounding to the errors of
its operands, element by element, so the bound of a formula is what the formula's operations add up to. An operation
may also take a subnormal operand for zero (`Known.read`), and flush a subnormal result to zero (`FLUSH`): no operator
that computes in fp32 promises fp32 subnormals. fp16's subnormals are normal numbers of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import torch

from te_dispatch.conformance.bounds import U32, rounding
from te_dispatch.conformance.rules import Instead, Within

#: Below the smallest normal fp32 number a result may be lost.
FLUSH = 2.0**-126

Dims = Union[int, Sequence[int]]


def gamma(n: int, unit: float = U32) -> float:
    """n roundings in a row: (1 + unit)^n - 1 <= n unit / (1 - n unit) (Higham, lemma 3.1)."""
    grown = max(n, 0) * unit
    return grown / (1 - grown) if grown < 0.5 else 1.0


@dataclass(frozen=True)
class Known:
    """A value and a bound on its error, both float64 and of one shape."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exactly(cls, x: torch.Tensor) -> Known:
        """What an operand holds: nothing was computed yet."""
        return cls(x.double(), torch.zeros_like(x, dtype=torch.float64))

    @classmethod
    def read(cls, x: torch.Tensor) -> Known:
        """What an operand is when fp32 arithmetic reads it: 0 instead, where it is subnormal in fp32."""
        value = x.double()
        return cls(value, torch.where(value.abs() < FLUSH, value.abs(), 0.0))

    @property
    def largest(self) -> torch.Tensor:
        """An upper bound on the magnitude of what was computed."""
        return self.value.abs() + self.error

    def rounded(self, times: float = 1.0) -> Known:
        """After `times` more roundings to fp32."""
        return Known(self.value, self.error + times * U32 * self.largest + FLUSH)

    def __neg__(self) -> Known:
        return Known(-self.value, self.error)

    def __add__(self, other: Union[Known, float]) -> Known:
        if not isinstance(other, Known):
            return Known(self.value + other, self.error).rounded()
        return Known(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other: Known) -> Known:
        return self + -other

    def __mul__(self, other: Union[Known, float]) -> Known:
        if not isinstance(other, Known):  # a constant, itself rounded to fp32
            return Known(self.value * other, self.error * abs(other)).rounded(2.0)
        error = self.largest * other.error + self.error * other.value.abs()
        return Known(self.value * other.value, error).rounded()

    def sum(self, dim: Dims, keepdim: bool = False) -> Known:
        """In any order: gamma(n - 1) of the sum of magnitudes."""
        dims = [dim] if isinstance(dim, int) else list(dim)
        n = 1
        for d in dims:
            n *= self.value.shape[d]
        if not dims:
            return self
        total, magnitude = self.value.sum(dims, keepdim), self.largest.sum(dims, keepdim)
        return Known(total, self.error.sum(dims, keepdim) + gamma(n - 1) * magnitude + n * FLUSH)

    def mean(self, dim: int, keepdim: bool = False) -> Known:
        n = self.value.shape[dim]
        return self.sum(dim, keepdim) * (1.0 / n)

    def reshape(self, *shape: int) -> Known:
        return Known(self.value.reshape(shape), self.error.reshape(shape))

    def t(self) -> Known:
        return Known(self.value.t(), self.error.t())

    def part(self, where: torch.Tensor) -> Known:
        """Where a condition holds; exactly 0 elsewhere."""
        zero = torch.zeros((), dtype=torch.float64)
        return Known(torch.where(where, self.value, zero), torch.where(where, self.error, zero))


def within(known: Known, expected: torch.Tensor, actual: torch.Tensor, instead: tuple[Instead, ...] = ()) -> Within:
    """The rule of a value that is rounded once to the result's dtype; the oracle rounded its own to `expected`'s.

    Where the value is not finite there is nothing to be near to: the same Inf, or NaN, is asked for.
    """
    error = known.error.reshape(expected.shape)
    limit = error * (1 + 2.0**-7) + rounding(expected, actual.dtype, expected.dtype)
    return Within(torch.where(expected.isfinite(), limit, 0.0).nan_to_num(0.0), instead=instead)


def or_nan(where: torch.Tensor) -> Instead:
    """NaN is as good there."""
    return Instead(where, torch.full((), torch.nan, dtype=torch.float64), torch.zeros((), dtype=torch.float64))
