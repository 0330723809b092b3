# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""exp, tanh and the logistic function in fp32, and the functions that activations are made of.

What is asked of an implementation: exp and tanh within 2 ulp (4 u32 relatively: CUDA's and ROCm's full-precision
functions promise 2, the C library 1), divisions and square roots within 1. The approximations that some compilers put
in with "fast math" (tanh.approx: 2^-11) do not meet it, and are not what "computed in fp32" means.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.known import FLUSH, Known

#: exp of less is 0 in fp32, subnormals included; the computed logistic function is 0 below it, too.
_VANISHING = -104.0
#: Relative error of exp and tanh.
TWO_ULP = 4 * U32
_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
QGELU = 1.702


def _moved(f: Callable[[torch.Tensor], torch.Tensor], t: Known) -> torch.Tensor:
    """How far an increasing function gets from its value while its argument moves by the argument's error."""
    value = f(t.value)
    return torch.maximum(f(t.value + t.error) - value, value - f(t.value - t.error)).nan_to_num(0.0)


def _of_oracle(below_one: torch.Tensor) -> torch.Tensor:
    """1 - f where the computed f is 1, with what the oracle's float64 itself loses where it subtracts f from 1."""
    return below_one + torch.where(below_one > 2.0**-54, 2.0**-52, 0.0)


def logistic(t: Known) -> Known:
    """s = 1 / (1 + exp(-t)).

    exp's own relative error counts (1 - s) times, the sum and the quotient 4 u32. Above t = 20, exp(-t) is below a
    quarter ulp of 1 and the computed s is 1. The smallest results may be flushed. Below t = -104 the computed s is
    exactly 0, whatever it is multiplied by.
    """
    s = torch.sigmoid(t.value)
    c = torch.sigmoid(-t.value)
    moved = _moved(torch.sigmoid, t)
    error = moved + (s + moved) * (c * TWO_ULP + 4 * U32) + FLUSH
    error = torch.where(t.value + t.error < _VANISHING, s, error)
    # Where s is subtracted from 1, the difference may be computed without s, at the near end of t.
    saturated = torch.maximum(_of_oracle(c), torch.sigmoid(t.error - t.value))
    return Known(s, torch.where(t.value - t.error > 20, saturated, error))


def one_minus_logistic(t: Known, s: Known) -> Known:
    """1 - s, computed so: the error of s, and a rounding unless s is 1."""
    c = torch.sigmoid(-t.value)
    return Known(c, torch.where(t.value - t.error > 20, s.error, s.error + U32 * (c + s.error)))


def tanh(t: Known) -> Known:
    """Beyond |t| = 10, 1 - |tanh| is below a tenth of an ulp and the computed value is 1; where 1 is added to it, the
    sum may be computed without it, and is anything from 0 to 1 - |tanh| at the near end of t."""
    value = torch.tanh(t.value)
    below_one = 2 * torch.sigmoid(-2 * t.value.abs())  # 1 - |tanh|, without cancelling
    moved = _moved(torch.tanh, t)
    error = moved + TWO_ULP * (value.abs() + moved) + FLUSH
    near = t.value.abs() - t.error
    saturated = torch.maximum(_of_oracle(below_one), 2 * torch.sigmoid(-2 * near))
    return Known(value, torch.where(near > 10, saturated, error))


def _gelu_argument(x: Known) -> Known:
    return (x + x * x * x * _CUBIC) * _ROOT


def gelu(x: Known) -> Known:
    """0.5 x (1 + tanh(t)): as the contract writes it, with the absolute error of u32 |x| where 1 + tanh cancels. It is
    exactly 0 where 2 s(2 t) is."""
    t = _gelu_argument(x)
    factor = tanh(t) + 1.0
    vanishing = 2 * (t.value + t.error) < _VANISHING
    # The exact sum where it cancels: 1 + tanh(t) = 2 s(2 t).
    value, most = torch.sigmoid(2 * t.value) * 2, torch.sigmoid(2 * (t.value + t.error)) * 2
    return x * Known(value, torch.where(vanishing, most, factor.error)) * 0.5


def gelu_derivative(x: Known) -> Known:
    """0.5 (1 + tanh t) + 0.5 x (1 - tanh^2 t) t'."""
    t = _gelu_argument(x)
    th = tanh(t)
    first = Known(torch.sigmoid(2 * t.value) * 2, (th + 1.0).error) * 0.5
    # 1 - tanh^2 = 4 s (1 - s) at 2 t, exactly; computed it errs by 2 |tanh| times tanh's error and two roundings near
    # 1, which are none where tanh is 1.
    value = 4 * torch.sigmoid(2 * t.value) * torch.sigmoid(-2 * t.value)
    saturated = t.value.abs() - t.error > 10
    error = 2 * th.error + torch.where(saturated, 0.0, 2 * U32 * th.value.square())
    slope = (x * x * (3 * _CUBIC) + 1.0) * _ROOT
    second = x * Known(value, error) * slope * 0.5
    # There the bell is 0, or what is left of it at the near end of t: a slope that overflows must make nothing else.
    near = (t.value.abs() - t.error).clamp_min(0)
    left = 2 * torch.sigmoid(2 * near) * torch.sigmoid(-2 * near) * x.largest * slope.largest
    return first + Known(second.value, torch.where(saturated, second.value.abs() + 2 * left + FLUSH, second.error))


def gated_logistic(x: Known, alpha: float) -> Known:
    """x s(alpha x)."""
    return x * logistic(x * alpha if alpha != 1.0 else x)


def gated_logistic_derivative(x: Known, alpha: float) -> Known:
    """s (1 + alpha x (1 - s))."""
    t = x * alpha if alpha != 1.0 else x
    s = logistic(t)
    return s * (t * one_minus_logistic(t, s) + 1.0)


def logistic_derivative(x: Known) -> Known:
    s = logistic(x)
    return s * one_minus_logistic(x, s)


def relu(x: Known) -> Known:
    """Exact: an error of x passes where x may be positive."""
    return Known(x.value.clamp_min(0), torch.where(x.value + x.error > 0, x.error, torch.zeros_like(x.error)))
