# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding as values known within a bound."""

from __future__ import annotations

import torch

from te_dispatch.conformance.bounds.elementary import TWO_ULP
from te_dispatch.conformance.bounds.known import Known


def _partner(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[u, v] -> [-v, u] of halves, or of pairs."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    u, v = x.chunk(2, -1)
    return torch.cat((-v, u), -1)


def rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, backward: bool) -> Known:
    """x cos t + R(x) sin t on the first features, or x cos t - R(x sin t); the other features pass.

    cos and sin, of any fp32 angle, err by 2 ulp of at most 1 (with the argument reduced in full: an angle of 10^5 is an
    ordinary position's). Two products and a sum do the rest.
    """
    r = angles.shape[-1]
    head = x.double()[..., :r]
    angle = angles.double()

    def trigonometric(value: torch.Tensor) -> Known:
        return Known(value, torch.full_like(value, TWO_ULP / 2))

    cos, sin = trigonometric(angle.cos()), trigonometric(angle.sin())
    if backward:
        turned = Known.read(head) * sin
        turned = Known(-_partner(turned.value, interleaved), _partner(turned.error, interleaved).abs())
    else:
        turned = Known.read(_partner(head, interleaved)) * sin
    out = Known.read(head) * cos + turned
    passing = Known.read(x[..., r:])
    return Known(torch.cat((out.value, passing.value), -1), torch.cat((out.error, passing.error), -1))
