# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention in float64, element by element where masks are concerned; gradients by autograd.

Written from the formulas, and on lists of single sequences, so that it shares neither layouts nor masks nor padding
with what it checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rules:
    """One sequence's options; `bottom_right` moves the diagonal, `causal` forbids later keys."""

    causal: bool = False
    bottom_right: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    softmax_type: str = "vanilla"
    bias_type: str = "no_bias"


def visible(i: int, j: int, len_q: int, len_kv: int, rules: Rules) -> bool:
    """Whether query i may look at key j."""
    diagonal = i + (len_kv - len_q if rules.bottom_right else 0)
    if rules.causal and j > diagonal:
        return False
    left, right = rules.window
    if left >= 0 and j < diagonal - left:
        return False
    return not (right >= 0 and j > diagonal + right)


def alibi_slopes(heads: int) -> list[float]:
    """Press et al.: 2^(-8/n), 2^(-16/n), .. for n heads, a power of two; else every second slope of 2n is added."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** int(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: Rules,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence. q (s_q, h, d), k, v (s_kv, g, ..) float64; bias (h, s_q, s_kv); masked bool (h, s_q, s_kv).

    Returns the output (s_q, h, d_v) and the visible logits' maximum per head.
    """
    heads, groups = q.shape[1], k.shape[1]
    k = k.repeat_interleave(heads // groups, dim=1)
    v = v.repeat_interleave(heads // groups, dim=1)
    scale = q.shape[-1] ** -0.5 if rules.scale is None else rules.scale
    z = torch.einsum("ihd,jhd->hij", q, k)
    len_q, len_kv = q.shape[0], k.shape[0]
    if rules.bias_type == "pre_scale_bias":
        z = z + bias
    z = z * scale
    if rules.softcap:
        z = rules.softcap * torch.tanh(z / rules.softcap)
    if rules.bias_type == "post_scale_bias":
        z = z + bias
    if rules.bias_type == "alibi":
        shift = len_kv - len_q if rules.bottom_right else 0
        distance = torch.tensor([[abs(j - i - shift) for j in range(len_kv)] for i in range(len_q)])
        z = z - torch.tensor(alibi_slopes(heads), dtype=z.dtype).view(-1, 1, 1) * distance
    seen = torch.tensor([[visible(i, j, len_q, len_kv, rules) for j in range(len_kv)] for i in range(len_q)])
    seen = seen.expand(heads, -1, -1)
    if masked is not None:
        seen = seen & ~masked
    e = torch.where(seen, torch.exp(torch.where(seen, z, 0.0)), 0.0)
    denominator = e.sum(-1, keepdim=True)
    if rules.softmax_type == "off-by-one":
        denominator = denominator + 1.0
    elif rules.softmax_type == "learnable":
        denominator = denominator + torch.exp(offset.view(-1, 1, 1))
    p = torch.where(seen, e / torch.where(denominator == 0.0, 1.0, denominator), 0.0)
    return torch.einsum("hij,jhd->ihd", p, v), torch.where(seen, z, -math.inf).amax((1, 2))


def assert_within(actual: torch.Tensor, expected: torch.Tensor, terms: int, what: str = "") -> None:
    """Compare a result with its float64 value.

    A sum of n products, each rounded once, is off by at most n u times the sum of magnitudes, u half the distance of 1
    to the next number (Higham, "Accuracy and Stability", 3.1). An attention chains five such sums (logits, softmax,
    output, and two in the backward), and the logits' absolute error enters through exp as a relative one, of the
    logits' magnitude, here below 8; magnitudes are bounded by the largest expected element, or 1. So: 40 n u for
    float32. Lower precisions accumulate in float32 too, and round four times: weights, their gradient, and results.
    """
    actual, expected = actual.detach(), expected.detach()
    unit = 2.0**-24
    low = 0.0 if actual.dtype == torch.float32 else 4 * torch.finfo(actual.dtype).eps / 2
    magnitude = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    bound = (40 * terms * unit + low) * magnitude
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = float((actual.double() - expected).abs().max()) if actual.numel() else 0.0
    assert error <= bound, f"{what}: off by {error:.3g}, at most {bound:.3g} allowed"
