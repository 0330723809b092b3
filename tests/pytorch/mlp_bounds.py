# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations from their formulas, and bounds on them and on `LayerNormMLP`, like those of `bounds`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import te_dispatch.pytorch as te

from .bounds import Bounded, BoundedNorm

Elementwise = Callable[[torch.Tensor], torch.Tensor]

BASES: dict[str, Elementwise] = {
    "gelu": lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    "qgelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu": lambda z: z.clamp(min=0),
    "srelu": lambda z: z.clamp(min=0) ** 2,
    "silu": lambda z: z * torch.sigmoid(z),
    "sigmoid": torch.sigmoid,
}
#: What the first half goes through in the gated ones.
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


def activation(kind: str, z: torch.Tensor, limit: float = 7.0, alpha: float = 1.702) -> torch.Tensor:
    """The activation `kind` of z, differentiable, in z's dtype."""
    if kind in BASES:
        return BASES[kind](z)
    u, v = z.chunk(2, -1)
    if kind == "clamped_swiglu":
        u, v = u.clamp(max=limit), v.clamp(-limit, limit)
        return u * torch.sigmoid(alpha * u) * (v + 1)
    return BASES[GATES[kind]](u) * v


def _with_derivative(f: Elementwise, z: Bounded, kinked: bool) -> tuple[Bounded, Bounded]:
    """f(z) and f'(z), for an f whose second derivative is at most 2, with a kink at 0 where `kinked`.

    2 is srelu's second derivative; those of the others stay below 0.9. With z off by e, f is off by at most
    (|f'| + e) e, and f' by 2 e, or by 1 more where the kink of relu lies that near. Rounding: 16 u each of
    1 + |z| + |f| for the elementary function and the factors around it; and for f' of the tanh form, where 1 - tanh^2,
    off by 4 u, is multiplied by 0.4 z (1 + 0.134 z^2), another 16 u |z|^3 / 8 covers the cubic term.
    """
    at = z.value.clone().requires_grad_()
    value = f(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    size = 1 + z.magnitude
    jump = (z.value.abs() <= z.error).double() if kinked else 0.0
    out = Bounded(value, (slope.abs() + z.error) * z.error)
    derivative = Bounded(slope, 2 * z.error + jump)
    return out.rounded(16, size + out.magnitude), derivative.rounded(16, size + z.magnitude**3 / 8)


class _Clamped:
    """clamp(z, low, high) and whether a gradient passes: a kink at each end."""

    def __init__(self, z: Bounded, low: float, high: float) -> None:
        self.value = Bounded(z.value.clamp(low, high), z.error)
        near = ((z.value - low).abs() <= z.error) | ((z.value - high).abs() <= z.error)
        self.passes = Bounded(((z.value >= low) & (z.value <= high)).double(), near.double())


class BoundedActivation:
    """`activation` of z (r, n), and its gradient."""

    def __init__(self, kind: str, z: Bounded, limit: float = 7.0, alpha: float = 1.702) -> None:
        self.gated = kind not in BASES
        if not self.gated:
            self.out, self._slope = _with_derivative(BASES[kind], z, kind == "relu")
            return
        u, v = (Bounded(*half) for half in zip(z.value.chunk(2, -1), z.error.chunk(2, -1)))
        if kind == "clamped_swiglu":
            first, second = _Clamped(u, -torch.inf, limit), _Clamped(v, -limit, limit)
            v = second.value + Bounded(torch.ones_like(v.value))
            # alpha is at most 1.702, with which the second derivative is qgelu's, 0.85.
            gate, slope = _with_derivative(lambda x: x * torch.sigmoid(alpha * x), first.value, False)
            self._slopes = slope * v * first.passes, gate * second.passes
        else:
            gate, slope = _with_derivative(BASES[GATES[kind]], u, GATES[kind] == "relu")
            self._slopes = slope * v, gate
        self.out = gate * v

    def backward(self, dy: Bounded) -> Bounded:
        if not self.gated:
            return dy * self._slope
        halves = [dy * slope for slope in self._slopes]
        return Bounded(torch.cat([h.value for h in halves], -1), torch.cat([h.error for h in halves], -1))


class BoundedMLP:
    """A float32 `LayerNormMLP` of x (.., n): `out` (r, n), `norm.y`, and the gradients.

    `params`: of the activation.
    """

    def __init__(self, layer: te.LayerNormMLP, x: torch.Tensor, **params: float) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        parameters = layer.layer_norm_weight, layer.layer_norm_bias
        self.norm = BoundedNorm(rows, *parameters, layer.eps, layer.zero_centered_gamma)
        self.weights = Bounded(layer.fc1_weight), Bounded(layer.fc2_weight)
        z = self.norm.y @ self.weights[0].T
        self.activation = BoundedActivation(
            layer.activation, z + Bounded(layer.fc1_bias) if layer.use_bias else z, **params
        )
        self.out = self.activation.out @ self.weights[1].T
        if layer.use_bias:
            self.out = self.out + Bounded(layer.fc2_bias)

    def backward(self, dy: Bounded, normed_grad: Bounded | None = None) -> dict[str, Bounded]:
        """Gradients by parameter, and of ``x``, for those of `out` and `norm.y`."""
        dz = self.activation.backward(dy @ self.weights[1])
        dn = dz @ self.weights[0]
        dx, dgamma, dbeta = self.norm.backward(dn if normed_grad is None else dn + normed_grad)
        return {
            "x": dx,
            "layer_norm_weight": dgamma,
            "layer_norm_bias": dbeta,
            "fc1_weight": dz.T @ self.norm.y,
            "fc1_bias": dz.sum(0),
            "fc2_weight": dy.T @ self.activation.out,
            "fc2_bias": dy.sum(0),
        }
