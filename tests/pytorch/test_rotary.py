# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding against complex numbers: a rotation is a product with exp(i t)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.pytorch.attention.rotary import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

from .bounds import Bounded

S, B, H, D = 7, 2, 3, 8


def turned(x: torch.Tensor, positions: torch.Tensor, dim: int, interleaved: bool) -> torch.Tensor:
    """x (tokens, h, d) float64 rotated by complex multiplication; positions (tokens,)."""
    theta = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    head, tail = x[..., :dim], x[..., dim:]
    pairs = head.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else head.chunk(2, -1)
    z = torch.complex(*pairs) * torch.polar(torch.ones_like(theta), theta)[:, None]
    parts = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((parts, tail), -1)


#: Angles reach 12 and are rounded to float32, as are cos, sin, two products and a sum of magnitude below 4.
BOUND = 4 * (12 + 4) * 2**-24


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("start", [False, True])
def test_rotation_and_its_gradient(layout: str, interleaved: bool, percent: float, start: bool) -> None:
    torch.manual_seed(0)
    freqs = RotaryPositionEmbedding(D, percent, interleaved=interleaved)(2 * S)
    lengths = [4, S] if layout == "thd" else [S, S]
    first = [2, 5] if start else [0, 0]
    x = torch.randn(sum(lengths), H, D)
    dy = torch.randn(sum(lengths), H, D)
    positions = torch.cat([torch.arange(n) + f for n, f in zip(lengths, first)])
    exact = x.double().requires_grad_()
    wanted = turned(exact, positions, int(D * percent), interleaved)
    wanted.backward(dy.double())

    def arrange(t: torch.Tensor) -> torch.Tensor:
        if layout == "thd":
            return t
        t = t.view(B, S, H, D)
        return t if layout == "bshd" else t.transpose(0, 1)

    leaf = arrange(x).clone().requires_grad_()
    y = apply_rotary_pos_emb(
        leaf, freqs, layout, interleaved=interleaved,
        start_positions=torch.tensor(first, dtype=torch.int32) if start else None,
        cu_seqlens=torch.tensor([0, 4, 4 + S], dtype=torch.int32) if layout == "thd" else None,
    )  # fmt: skip
    y.backward(arrange(dy))
    assert (y.double() - arrange(wanted)).abs().max() < BOUND
    assert (leaf.grad.double() - arrange(exact.grad)).abs().max() < BOUND


def _angles(values: list[float]) -> Bounded:
    """A power, its reciprocal and the product with the position: the power off by a whole unit in the last place."""
    return Bounded(torch.tensor(values, dtype=torch.float64)).rounded(4)


def test_angles() -> None:
    halves = RotaryPositionEmbedding(4, rotary_base=100.0)(3, offset=2)
    assert halves.shape == (3, 1, 1, 4)
    assert _angles([3.0, 0.3, 3.0, 0.3]).holds(halves[1, 0, 0])
    pairs = RotaryPositionEmbedding(4, rotary_base=100.0, interleaved=True)(3, offset=2)
    assert _angles([3.0, 3.0, 0.3, 0.3]).holds(pairs[1, 0, 0])


@pytest.mark.parametrize("length, factor", [(16, 4.0), (32, 4.0), (48, 6.0)])
def test_interpolation(length: int, factor: float) -> None:
    """Fixed up to pretrained * factor, beyond that just as much as the length needs."""
    plain = RotaryPositionEmbedding(D)(length)
    # One product was rounded in plain; here the positions are too, and the factor they are multiplied with.
    interpolated = Bounded(plain.double() / factor).rounded(4)
    assert interpolated.holds(RotaryPositionEmbedding(D, 1.0, 4, 8)(length))


def test_a_model_in_bfloat16_keeps_its_angles() -> None:
    module = RotaryPositionEmbedding(D)
    wanted = module(4096)
    assert torch.equal(module.bfloat16()(4096), wanted)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dim": 7}, "dim \\* rotary_percent"),
        ({"dim": 8, "rotary_percent": 0.0}, "rotary_percent"),
        ({"dim": 8, "seq_len_interpolation_factor": 2}, "must be given together"),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryPositionEmbedding(**arguments)


def test_call_errors() -> None:
    freqs = RotaryPositionEmbedding(D)(S)
    x = torch.zeros(S, B, H, D)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"t": x[0]}, ValueError, "t must have 4 dimensions"),
        ({"tensor_format": "bhsd"}, ValueError, "tensor_format must be one of"),
        ({"freqs": freqs[:3]}, ValueError, "freqs must cover 7 positions"),
        ({"freqs": freqs[:, 0]}, ValueError, r"freqs must be \(s, 1, 1, r\)"),
        ({"t": x[..., :4]}, ValueError, "at most 4"),
        ({"t": x[0], "tensor_format": "thd"}, ValueError, "needs cu_seqlens"),
        ({"cp_size": 2}, NotImplementedError, "cp_size=2"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            apply_rotary_pos_emb(**{"t": x, "freqs": freqs, **arguments})


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_the_result_is_contiguous_whatever_the_input(layout: str) -> None:
    freqs = RotaryPositionEmbedding(D)(S)
    dense = torch.randn(B, S, H, D) if layout == "bshd" else torch.randn(S, B, H, D)
    given = dense.transpose(0, 1).contiguous().transpose(0, 1)
    given.requires_grad_()
    y = apply_rotary_pos_emb(given, freqs, layout)
    assert not given.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, apply_rotary_pos_emb(dense, freqs, layout))
    y.view(-1).sum().backward()
    assert given.grad is not None


# -- queries, keys and values at once -----------------------------------------------------------------------------

GROUPS, VALUE = 2, 6


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("start", [False, True])
def test_queries_and_keys_of_a_projection_are_rotated(layout: str, start: bool) -> None:
    torch.manual_seed(0)
    sizes = [2 * D, D, VALUE]
    shape = (S, B) if layout == "sbhd" else (B, S)
    qkv = torch.randn(*shape, GROUPS, sum(sizes), dtype=torch.float64).float().requires_grad_()
    q_freqs, k_freqs = RotaryPositionEmbedding(D)(2 * S), RotaryPositionEmbedding(D, rotary_base=500.0)(2 * S)
    options: Any = {"start_positions": torch.tensor([2, 5], dtype=torch.int32)} if start else {}
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, sizes, layout, **options)
    assert (q.shape, k.shape, v.shape) == ((*shape, 4, D), (*shape, GROUPS, D), (*shape, GROUPS, VALUE))
    heads = [qkv[:, :, group, D * head : D * (head + 1)] for group in range(GROUPS) for head in range(2)]
    assert torch.equal(q, apply_rotary_pos_emb(torch.stack(heads, 2), q_freqs, layout, **options))
    assert torch.equal(k, apply_rotary_pos_emb(qkv[..., 2 * D : 3 * D], k_freqs, layout, **options))
    assert torch.equal(v, qkv[..., 3 * D :]) and all(part.is_contiguous() for part in (q, k, v))
    # Rotations keep lengths, so that the gradient of half the squares is the input.
    (sum(part.square().sum() for part in (q, k, v)) / 2).backward()
    torch.testing.assert_close(qkv.grad, qkv.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tensor_format": "thd"}, ValueError, "tensor_format must be one of 'sbhd', 'bshd', got 'thd'"),
        ({"qkv_split_arg_list": [16, 8]}, ValueError, "qkv_split_arg_list must be the features of"),
        ({"qkv_split_arg_list": [12, 8, 12]}, ValueError, "divisible by those of keys, got \\[12, 8, 12\\]"),
        ({"qkv_split_arg_list": [16, 8, 6]}, ValueError, "qkv must have 4 dimensions, the last of 30"),
        ({"cp_size": 2}, NotImplementedError, "cp_size=2"),
        ({"q_freqs": torch.zeros(2, 1, 1, 8)}, ValueError, "freqs must cover 7 positions"),
        ({"k_freqs": torch.zeros(2, 1, 1, 8)}, ValueError, "freqs must cover 7 positions"),
    ],
)
def test_a_projection_that_does_not_fit(change: dict[str, Any], error: type[Exception], words: str) -> None:
    freqs = RotaryPositionEmbedding(D)(S)
    given = {"qkv": torch.randn(S, B, 2, 32), "q_freqs": freqs, "k_freqs": freqs, "qkv_split_arg_list": [16, 8, 8]}
    with pytest.raises(error, match=words):
        apply_fused_qkv_rotary_pos_emb(**{**given, **change})
