# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention of the Triton backend where the conformance kit does not look: many tiles, capture, wide addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops

pytest.importorskip("te_dispatch_triton")

CAUSAL = {"mask": "causal"}


def operands(
    rows: int, columns: int, heads: int = 4, groups: int = 2, features: int = 128, dtype: Any = torch.bfloat16
):
    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = ((2, rows, heads, features), (2, columns, groups, features), (2, columns, groups, features))
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    with te_dispatch.using(attention="triton"):
        made = ops.attention_fwd(q, k, v, layout="bshd", **options)
        assert made.saved is not None and made.saved.implementation == "triton.flash_attention"
        dout = made.out.detach().roll(1, -1)
        back = ops.attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, layout="bshd", **options)
    return made.out, made.lse, back.dq, back.dk, back.dv


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Plain attention in float64, and its derivatives for the same gradient."""
    a, b, c = (x.double().transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    share = q.shape[2] // k.shape[2]
    z = a @ b.repeat_interleave(share, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    z = z.masked_fill(hidden, -torch.inf)
    out = torch.softmax(z, -1) @ c.repeat_interleave(share, 1)
    dout = out.detach().transpose(1, 2).to(q.dtype).roll(1, -1).double().transpose(1, 2)
    grads = torch.autograd.grad(out, (a, b, c), dout)
    return out.detach().transpose(1, 2), torch.logsumexp(z.detach(), -1), *(x.transpose(1, 2) for x in grads)


@pytest.mark.parametrize("features", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, (300, 0)])
def test_many_tiles(features: int, dtype: torch.dtype, window: tuple[int, int] | None) -> None:
    q, k, v = operands(1000, 900, features=features, dtype=dtype)
    i, j = torch.arange(1000, device="cuda")[:, None], torch.arange(900, device="cuda")[None]
    hidden = j > i
    if window is not None:
        hidden = hidden | (j < i - window[0])
        q, k, v = q[:, :900], k, v
        hidden = hidden[:900]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for found, known in zip(both(q, k, v, mask="causal", window=window), expected(q, k, v, hidden)):
        torch.testing.assert_close(found.double(), known, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 129, 1000])
@pytest.mark.parametrize(
    ("features", "features_v", "start"), [(24, 8, 0), (8, 24, 0), (7, 7, 0), (1, 1, 0), (64, 32, 1), (128, 128, 1)]
)
def test_operands_that_are_loaded_one_by_one(
    features: int, features_v: int, start: int, size: int, dtype: torch.dtype
) -> None:
    """Sizes and addresses that are no multiple of 16 bytes: what NVIDIA's assembler 12.8 made of them was wrong."""
    q, k, _ = operands(size, size, features=features, dtype=dtype)
    v = operands(size, size, features=features_v, dtype=dtype)[2]
    q, k, v = (torch.cat((x.new_zeros(start), x.flatten()))[start:].view(x.shape) for x in (q, k, v))
    hidden = torch.ones(size, size, device="cuda", dtype=torch.bool).triu(1)
    for found, known in zip(both(q, k, v, **CAUSAL), expected(q, k, v, hidden)):
        torch.testing.assert_close(found.double(), known, rtol=2e-2, atol=2e-2)


def test_the_same_bits_every_time() -> None:
    q, k, v = operands(2048, 2048)
    first = both(q, k, v, **CAUSAL)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, both(q, k, v, **CAUSAL)))


def test_a_captured_call_follows_its_dropout_state() -> None:
    q, k, v = operands(512, 512)
    state = torch.tensor([1, 2], device="cuda")
    options = {"mask": "causal", "dropout_p": 0.2, "rng_state": state}
    both(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(q, k, v, **options)
    for seed in (1, 5):
        state[0] = seed
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, both(q, k, v, **options)))


def test_addresses_beyond_32_bits(room: Any) -> None:
    """More than 2^31 elements: the last sequence's results are those that it has alone."""
    batch, rows, heads, features = 16400, 128, 16, 64
    room(48)
    q = torch.empty(batch, rows, heads, features, device="cuda", dtype=torch.bfloat16)
    q[-1:].normal_()
    q[:-1] = 0
    for found, alone in zip(both(q, q, q, **CAUSAL), both(q[-1:], q[-1:], q[-1:], **CAUSAL)):
        assert torch.equal(found[-1:], alone)
