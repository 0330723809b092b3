# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary embedding beyond the conformance kit: angles of any size, strides, many sequences, arguments."""

from __future__ import annotations

import pytest
import torch


def turned(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x cos t + [-v, u] sin t in float64, t broadcastable to x."""
    u, v = x.double().chunk(2, -1)
    return (x.double() * t.double().cos() + torch.cat((-v, u), -1) * t.double().sin()).to(x.dtype)


@pytest.mark.interpreted
def test_angles_of_any_size_are_reduced_in_full() -> None:
    from te_dispatch_triton import position

    t = torch.logspace(-30, 15, 400, dtype=torch.float64).float()
    t = torch.cat((t, -t, torch.arange(400) * (torch.pi / 4), torch.zeros(2)))
    freqs = torch.stack((t, t), -1).view(-1, 1, 1, 2)
    x = torch.tensor([1.0, 0.0]).expand(len(t), 1, 1, 2)
    y = position.rope_fwd(x, freqs)
    expected = torch.stack((t.double().cos(), t.double().sin()), -1)
    assert (y.view(-1, 2).double() - expected).abs().max() < 1.2e-7


@pytest.mark.interpreted
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_gradient_turns_back(interleaved: bool) -> None:
    """Of angles that every pair shares, the gradient is the inverse rotation."""
    from te_dispatch_triton import position

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, 3, 24, generator=generator)
    t = torch.randn(9, 1, 1, 8, generator=generator) * 100
    freqs = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
    y = position.rope_fwd(x, freqs, interleaved=interleaved)
    torch.testing.assert_close(position.rope_bwd(y, freqs, interleaved=interleaved), x)
    assert torch.equal(y[..., 16:], x[..., 16:])


@pytest.mark.interpreted
def test_views_of_a_packed_tensor_and_offsets() -> None:
    from te_dispatch_triton import position

    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(5, 2, 3, 3 * 8, generator=generator)
    freqs = torch.randn(40, 1, 1, 8, generator=generator)
    offsets = torch.tensor([30, 3], dtype=torch.int32)
    x = packed[..., 8:16]
    y = position.rope_fwd(x, freqs, offsets=offsets)
    t = freqs.view(40, 8)[torch.arange(5)[:, None] + offsets]
    torch.testing.assert_close(y, turned(x, t[:, :, None]))
    y = position.rope_fwd(x.transpose(0, 1), freqs, layout="bshd", offsets=offsets)
    torch.testing.assert_close(y, turned(x, t[:, :, None]).transpose(0, 1))


@pytest.mark.interpreted
def test_more_sequences_than_are_compared_at_a_time() -> None:
    from te_dispatch_triton import position

    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 4, (150,), generator=generator)
    ends = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    tokens = int(ends[-1])
    x = torch.randn(tokens + 5, 2, 6, generator=generator)
    freqs = torch.randn(8, 1, 1, 6, generator=generator)
    y = position.rope_fwd(x, freqs, layout="thd", cu_seqlens=ends)
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    torch.testing.assert_close(y[:tokens], turned(x[:tokens], freqs.view(8, 6)[places][:, None]))
    assert torch.equal(y[tokens:], x[tokens:])


@pytest.mark.interpreted
def test_arguments_are_checked() -> None:
    from te_dispatch_triton import position

    freqs = torch.zeros(4, 1, 1, 8)
    with pytest.raises(ValueError, match=r"^freqs: "):
        position.rope_fwd(torch.zeros(5, 1, 1, 8), freqs)
    with pytest.raises(ValueError, match=r"^dy: "):
        position.rope_bwd(torch.zeros(4, 1, 8), freqs)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        position.rope_fwd(torch.zeros(4, 1, 8), freqs, layout="thd")
