# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout, optimizer steps and mixture-of-experts against PyTorch's own or a loop over Python numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantizers import BlockQuantizer
from te_dispatch_torch import quantize, training


def test_dropout_add() -> None:
    x, residual, bias = torch.randn(6, 50), torch.randn(6, 50), torch.randn(50)
    rng = torch.tensor([5, 9])
    out, mask = training.dropout_add_fwd(x, residual, bias=bias, dropout_p=0.25, rng_state=rng)
    want = residual.double() + (x.double() + bias.double()) * mask.double() / 0.75
    # Four roundings, each at most u32 of an intermediate below 16.
    assert ((out.double() - want).abs() <= 4 * 2.0**-24 * 16).all() and 0 < mask.sum() < mask.numel()
    again = training.dropout_add_fwd(x, residual, bias=bias, dropout_p=0.25, rng_state=rng)
    assert torch.equal(again.out, out) and torch.equal(again.mask, mask)
    dy = torch.randn(6, 50).bfloat16()
    dx = training.dropout_add_bwd(dy, mask, dropout_p=0.25)
    assert torch.equal(dx, torch.where(mask != 0, dy.float() * (1 / 0.75), 0.0).bfloat16())
    plain = training.dropout_add_fwd(x)
    assert plain.mask is None and torch.equal(plain.out, x) and plain.out.data_ptr() != x.data_ptr()
    with pytest.raises(ValueError, match="rng_state"):
        training.dropout_add_fwd(x, dropout_p=0.5)


@pytest.mark.parametrize("adam_w", [False, True])
def test_adam_follows_pytorch(adam_w: bool) -> None:
    """PyTorch's optimizer in float64; each of 3 steps adds some 16 roundings of values below 4."""
    params = [torch.randn(5, 3), torch.randn(7)]
    exact = [p.double().requires_grad_() for p in params]
    kind = torch.optim.AdamW if adam_w else torch.optim.Adam
    optimizer = kind(exact, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    low = [p.bfloat16() for p in params]
    options: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2, "adam_w": adam_w,
    }  # fmt: skip
    for step in (1, 2, 3):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(exact, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        training.multi_tensor_adam(low, grads, averages, squares, step=step, master=params, **options)
        before = [p.clone() for p in params]
        training.multi_tensor_adam(
            low, grads, averages, squares, step=step, master=params, noop_flag=torch.ones(1), **options
        )
        assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    for p, e, rounded in zip(params, exact, low, strict=True):
        assert ((p.double() - e.detach()).abs() <= 3 * 16 * 2.0**-24 * 4).all()
        assert torch.equal(rounded, p.bfloat16())


def test_l2norm_and_scale() -> None:
    tensors = [torch.randn(100).bfloat16(), torch.randn(3, 4).bfloat16()]
    each = torch.tensor([t.double().norm() for t in tensors])
    got = training.multi_tensor_l2norm(tensors, per_tensor=True)
    assert (got.double() - each).abs().max() <= 100 * 2.0**-24 * each.max()
    total = training.multi_tensor_l2norm(tensors)
    assert total.shape == (1,) and abs(total.double() - each.norm()) <= 100 * 2.0**-24 * each.norm()
    outputs, flag = [torch.empty(t.shape) for t in tensors], torch.zeros(1)
    training.multi_tensor_scale(tensors, outputs, 0.3, noop_flag=flag)
    assert torch.equal(outputs[0], tensors[0].float() * 0.3) and flag.item() == 0
    tensors[0][3] = torch.inf
    training.multi_tensor_scale(tensors, outputs, 0.3, noop_flag=flag)
    assert flag.item() == 1


def _by_loop(indices: torch.Tensor, rows: int) -> list[list[int]]:
    """Row of every choice: experts in order, tokens in order, nothing behind `rows`."""
    row_map = [[-1] * indices.shape[1] for _ in range(indices.shape[0])]
    row = 0
    for expert in range(int(indices.max()) + 1):
        for token, choices in enumerate(indices.tolist()):
            for place, chosen in enumerate(choices):
                if chosen == expert:
                    row_map[token][place] = row if row < rows else -1
                    row += 1
    return row_map


@pytest.mark.parametrize("capacity", [None, 7, 40])
def test_moe(capacity: int | None) -> None:
    indices = torch.tensor([[2, 0], [1, 2], [-1, 0], [2, 1], [0, -1], [1, 0]], dtype=torch.int32)
    x, probs = torch.randn(6, 8), torch.rand(6, 2)
    rows = 12 if capacity is None else capacity
    got = training.moe_permute(x, indices, probs=probs, capacity=capacity)
    want = _by_loop(indices, rows)
    assert got.row_map.tolist() == want and got.row_map.dtype == torch.int32
    filled = torch.zeros(rows, 8)
    carried = torch.zeros(rows)
    for token, places in enumerate(want):
        for choice, row in enumerate(places):
            if row >= 0:
                filled[row], carried[row] = x[token], probs[token, choice]
    assert torch.equal(got.permuted, filled) and torch.equal(got.probs, carried)

    y = torch.randn(rows, 8).double().requires_grad_()
    weights = probs.double().requires_grad_()
    kept = (got.row_map >= 0).double()
    exact = ((y[got.row_map.clamp_min(0).long()] * kept[..., None]) * weights[..., None]).sum(1)
    back = training.moe_unpermute(y.detach().float(), got.row_map, probs=probs)
    # Two products and a sum of two; the gradient of probs sums 8.
    assert (back.double() - exact.detach()).abs().max() <= 4 * 2.0**-24 * 16
    dy = torch.randn(6, 8)
    exact.backward(dy.double())
    grads = training.moe_unpermute_bwd(dy, y.detach().float(), got.row_map, probs=probs)
    assert (grads.dinput.double() - y.grad).abs().max() <= 2 * 2.0**-24 * 16
    assert (grads.dprobs.double() - weights.grad).abs().max() <= 10 * 2.0**-24 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_without_tokens_fills_its_capacity_with_zeros(dtype: torch.dtype) -> None:
    indices = torch.zeros((0, 2), dtype=torch.int32)
    got = training.moe_permute(torch.zeros(0, 8, dtype=dtype), indices, probs=torch.zeros(0, 2), capacity=5)
    assert torch.equal(got.permuted, torch.zeros(5, 8, dtype=dtype))
    assert torch.equal(got.probs, torch.zeros(5)) and got.row_map.shape == (0, 2)
    record = quantize.quantize(torch.zeros(0, 256, dtype=dtype), BlockQuantizer(), usage="row")
    moved = training.moe_permute(record, indices, capacity=5).permuted
    assert moved.shape == (5, 256) and not moved.row_data.any() and moved.row_scale_inv.shape == (5, 2)


def test_moe_moves_scales_with_their_rows() -> None:
    x = quantize.quantize(torch.randn(4, 256) * torch.logspace(-3, 3, 4)[:, None], BlockQuantizer(), usage="row")
    indices = torch.tensor([[1], [0], [1], [0]])
    got = training.moe_permute(x, indices).permuted
    assert torch.equal(quantize.dequantize(got), quantize.dequantize(x)[[1, 3, 0, 2]])
    with pytest.raises(ValueError, match="block_2d"):
        tiles = quantize.quantize(torch.randn(4, 8), BlockQuantizer(two_d=True), usage="row")
        training.moe_permute(tiles, indices)
