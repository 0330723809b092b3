# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout, optimizer steps and mixture-of-experts: known values, float64 autograd, PyTorch's optimizers, loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, MXFP8Quantizer, NVFP4Quantizer
from te_dispatch_reference.quantize import dequantize, quantize
from te_dispatch_reference.training import (
    dropout_add_bwd,
    dropout_add_fwd,
    moe_permute,
    moe_unpermute,
    moe_unpermute_bwd,
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rng(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64)


def once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 rounded to `dtype`, through float32: wrong by one unit on ties that float32 makes, none in these data."""
    return exact.detach().to(dtype)


# -- dropout ---------------------------------------------------------------------------------------------------------


def first_word(index: int, seed: int, offset: int) -> int:
    """Philox4x32-10's first output word in Python's integers, after the paper's definition of one round."""
    low = 0xFFFFFFFF
    c = [index & low, index >> 32, offset & low, offset >> 32]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[0]


def test_the_scalar_philox_gives_the_papers_vectors() -> None:
    """Random123's known answers: counter and key all zeros, and all ones."""
    assert first_word(0, 0, 0) == 0x6627E8D5
    ones = 2**64 - 1
    assert first_word(ones, ones, ones) == 0x408F276D


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (5, 9), (-1, 2**40), (2**62 + 3, -7)])
def test_the_mask_is_philoxs(seed: int, offset: int) -> None:
    p = 0.3
    mask = dropout_add_fwd(torch.ones(3, 4, 5), dropout_p=p, rng_state=rng(seed, offset)).mask
    words = [first_word(i, seed % 2**64, offset % 2**64) for i in range(60)]
    assert mask.dtype == torch.uint8 and mask.flatten().tolist() == [int(w / 2**32 >= p) for w in words]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dropout_add_and_its_gradient(dtype: torch.dtype, with_residual: bool, with_bias: bool) -> None:
    x, residual, bias, dy = (randn(*s, seed=n).to(dtype) for n, s in enumerate([(6, 50), (6, 50), (50,), (6, 50)]))
    p = 0.25
    out, mask = dropout_add_fwd(
        x, residual if with_residual else None, bias=bias if with_bias else None, dropout_p=p, rng_state=rng(5, 9)
    )
    exact = x.double().requires_grad_()
    y = (exact + bias.double() if with_bias else exact) * mask.double() / (1 - p)
    y = y + residual.double() if with_residual else y
    y.backward(dy.double())
    assert torch.equal(out, once(y, dtype)) and out.dtype == dtype
    assert torch.equal(dropout_add_bwd(dy, mask, dropout_p=p), once(exact.grad, dtype))


def test_dropout_properties() -> None:
    x = torch.ones(400, 500)
    made = {seed: dropout_add_fwd(x, dropout_p=0.4, rng_state=rng(seed, 1)).mask for seed in (1, 2)}
    for mask in made.values():
        # Six standard deviations of a binomial count.
        assert abs(int(mask.sum()) - 0.6 * x.numel()) <= 6 * math.sqrt(0.24 * x.numel())
    both = int((made[1] & made[2]).sum())
    assert abs(both - 0.36 * x.numel()) <= 6 * math.sqrt(0.36 * 0.64 * x.numel()), "masks of two seeds are independent"
    # An element's draw depends on its place alone: more rows change none of those before.
    fewer = dropout_add_fwd(x[:7], dropout_p=0.4, rng_state=rng(1, 1)).mask
    assert torch.equal(fewer, made[1][:7])
    assert not torch.equal(dropout_add_fwd(x, dropout_p=0.4, rng_state=rng(1, 2)).mask, made[1])
    # What is dropped is 0 whatever it was, and the residual passes.
    special = torch.full((2, 40), math.nan)
    out, mask = dropout_add_fwd(special, torch.full((2, 40), 3.0), dropout_p=0.5, rng_state=rng(3, 4))
    assert torch.equal(out.isnan(), mask == 1) and (out[mask == 0] == 3.0).all() and 0 < mask.sum() < mask.numel()
    assert not dropout_add_bwd(special, torch.zeros_like(mask), dropout_p=0.5).any()


def test_dropout_of_nothing_copies() -> None:
    x, residual = randn(3, 4), randn(3, 4, seed=1)
    plain = dropout_add_fwd(x)
    assert plain.mask is None and torch.equal(plain.out, x) and plain.out.data_ptr() != x.data_ptr()
    assert torch.equal(dropout_add_fwd(x, residual).out, x + residual)
    dx = dropout_add_bwd(x)
    assert torch.equal(dx, x) and dx.data_ptr() != x.data_ptr()
    empty = dropout_add_fwd(torch.zeros(0, 4), dropout_p=0.5, rng_state=rng(1, 1))
    assert empty.out.shape == empty.mask.shape == (0, 4)


# -- optimizer steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adam_w", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_adam_follows_pytorch(adam_w: bool, weight_decay: float) -> None:
    """PyTorch's optimizer in float64; per step, w and both moments are rounded once (2^-24 relative, values below 4),
    and a moment's rounding moves lr m / sqrt(v), at most 3 here, by lr (1 + 1/2) 2^-24 of that.
    """
    params = [randn(5, 3), randn(7)]
    exact = [p.double().requires_grad_() for p in params]
    optimizer = (torch.optim.AdamW if adam_w else torch.optim.Adam)(
        exact, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay
    )
    averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    low = [p.bfloat16() for p in params]
    options: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": weight_decay, "adam_w": adam_w,
    }  # fmt: skip
    for step in (1, 2, 3):
        grads = [randn(*p.shape, seed=step).bfloat16() for p in params]
        for p, g in zip(exact, grads, strict=True):
            p.grad = g.double()
        optimizer.step()
        multi_tensor_adam(low, grads, averages, squares, step=step, master=params, **options)
    for p, e, rounded in zip(params, exact, low, strict=True):
        assert ((p.double() - e.detach()).abs() <= 3 * (4 + 0.1 * 1.5 * 3) * 2.0**-24).all()
        assert torch.equal(rounded, p.bfloat16())


@pytest.mark.parametrize("bias_correction", [False, True])
def test_one_adam_step_is_the_formula_rounded_once(bias_correction: bool) -> None:
    w, g, m, v = randn(50), randn(50, seed=1), randn(50, seed=2), randn(50, seed=3).abs()
    wd, gd, md, vd = (t.double() for t in (w, g, m, v))
    md, vd = 0.9 * md + (1 - 0.9) * gd, 0.99 * vd + (1 - 0.99) * gd**2
    c1, c2 = (1 - 0.9**4, 1 - 0.99**4) if bias_correction else (1.0, 1.0)
    want = wd - 0.01 * ((md / c1) / ((vd / c2).sqrt() + 1e-3) + 0.1 * wd)
    multi_tensor_adam(
        [w], [g], [m], [v], lr=0.01, beta2=0.99, eps=1e-3, step=4, weight_decay=0.1, bias_correction=bias_correction
    )
    assert torch.equal(w, want.float()) and torch.equal(m, md.float()) and torch.equal(v, vd.float())


def test_a_flagged_adam_step_writes_nothing() -> None:
    tensors = [[randn(4, seed=n).abs()] for n in range(4)]
    master = [randn(4, seed=9)]
    before = [t.clone() for (t,) in (*tensors, master)]
    multi_tensor_adam(*tensors, lr=0.1, master=master, noop_flag=torch.ones(1))
    assert all(torch.equal(a, t) for a, (t,) in zip(before, (*tensors, master), strict=True))
    multi_tensor_adam(*tensors, lr=0.1, master=master, noop_flag=torch.zeros(1))
    assert not torch.equal(before[4], master[0]) and torch.equal(tensors[0][0], master[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_l2norm(dtype: torch.dtype) -> None:
    tensors = [randn(100).to(dtype), randn(3, 4).to(dtype), torch.zeros(0, dtype=dtype)]
    each = torch.stack([t.double().norm() for t in tensors])
    # The oracle's own sums differ in the last bits of float64, and may thus round the other way.
    torch.testing.assert_close(multi_tensor_l2norm(tensors, per_tensor=True).double(), each, rtol=2.0**-23, atol=0.0)
    total = multi_tensor_l2norm(tensors)
    assert total.dtype == torch.float32 and total.shape == (1,)
    torch.testing.assert_close(total.double(), each.norm().view(1), rtol=2.0**-23, atol=0.0)


def test_l2norm_of_extremes() -> None:
    """3-4-5 triangles whose squares float32 cannot hold."""
    for size in (2.0**100, 2.0**-120, 1.0):
        assert multi_tensor_l2norm([torch.tensor([3 * size]), torch.tensor([4 * size])]).item() == 5 * size
    assert multi_tensor_l2norm([torch.tensor([math.inf, 1.0])]).item() == math.inf
    assert math.isnan(multi_tensor_l2norm([torch.tensor([math.nan, math.inf])]).item())


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale(dtype: torch.dtype) -> None:
    inputs, flag = [randn(100).to(dtype), randn(3, 4).to(dtype)], torch.zeros(1)
    for out in FLOATS:
        outputs = [torch.empty(t.shape, dtype=out) for t in inputs]
        multi_tensor_scale(inputs, outputs, 0.3, noop_flag=flag)
        assert all(torch.equal(o, once(t.double() * 0.3, out)) for o, t in zip(outputs, inputs, strict=True))
    assert flag.item() == 0
    multi_tensor_scale(inputs, inputs, 0.5)
    assert torch.equal(inputs[1], (randn(3, 4).to(dtype).double() * 0.5).to(dtype)), "in place"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_scale_flags_what_is_not_finite_and_still_writes(bad: float) -> None:
    inputs, flag = [torch.ones(3), torch.tensor([1.0, bad])], torch.zeros(1)
    outputs = [torch.zeros(3), torch.zeros(2)]
    multi_tensor_scale(inputs, outputs, 2.0, noop_flag=flag)
    assert flag.item() == 1 and outputs[0].tolist() == [2.0] * 3 and outputs[1][0].item() == 2.0
    assert not outputs[1][1].isfinite()
    multi_tensor_scale([torch.ones(3)], [torch.zeros(3)], 2.0, noop_flag=flag)
    assert flag.item() == 1, "what an earlier call found is kept"


# -- mixture of experts ----------------------------------------------------------------------------------------------

INDICES = torch.tensor([[2, 0], [1, 2], [-1, 0], [2, 1], [0, -1], [1, 0]], dtype=torch.int32)


def by_loop(indices: torch.Tensor, rows: int) -> list[list[int]]:
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


@pytest.mark.parametrize("capacity", [None, 0, 7, 40])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permute(capacity: int | None, dtype: torch.dtype) -> None:
    x, probs = randn(6, 8).to(dtype), randn(6, 2).to(dtype)
    x[0, :2] = torch.tensor([math.nan, math.inf])
    rows = 12 if capacity is None else capacity
    for indices in (INDICES, INDICES.long()):
        got = moe_permute(x, indices, probs=probs, capacity=capacity)
        want = by_loop(INDICES, rows)
        assert got.row_map.tolist() == want and got.row_map.dtype == torch.int32
        filled, carried = torch.zeros(rows, 8, dtype=dtype), torch.zeros(rows, dtype=dtype)
        for token, places in enumerate(want):
            for choice, row in enumerate(places):
                if row >= 0:
                    filled[row], carried[row] = x[token], probs[token, choice]
        assert torch.equal(got.permuted.view(-1).view(torch.uint8), filled.view(-1).view(torch.uint8))
        assert torch.equal(got.probs, carried)
    assert moe_permute(x, INDICES).probs is None


def test_a_stable_sort_of_many() -> None:
    indices = torch.randint(-1, 5, (64, 3), generator=torch.Generator().manual_seed(1))
    got = moe_permute(randn(64, 4), indices)
    assert got.row_map.tolist() == by_loop(indices, 192)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute_and_its_gradients(with_probs: bool, dtype: torch.dtype) -> None:
    row_map = moe_permute(torch.zeros(6, 1), INDICES, capacity=7).row_map
    x, dy, probs = randn(7, 8).to(dtype), randn(6, 8).to(dtype), randn(6, 2)
    xd, pd = x.double().requires_grad_(), probs.double().requires_grad_()
    terms = [
        [xd[row] * (pd[t, c] if with_probs else 1.0) for c, row in enumerate(rows) if row >= 0]
        for t, rows in enumerate(row_map.tolist())
    ]
    exact = torch.stack([sum(found, torch.zeros(8, dtype=torch.float64)) for found in terms])
    given = probs if with_probs else None
    out = moe_unpermute(x, row_map, probs=given)
    assert torch.equal(out, once(exact, dtype))
    exact.backward(dy.double())
    back = moe_unpermute_bwd(dy, x, row_map, probs=given)
    assert torch.equal(back.dinput, once(xd.grad, dtype))
    assert (back.dprobs is None) != with_probs
    if with_probs:
        # Eight float64 terms may be summed in another order.
        torch.testing.assert_close(back.dprobs.double(), pd.grad, rtol=2.0**-23, atol=2.0**-48)


def test_a_dropped_choice_counts_nothing_whatever_its_probability() -> None:
    x, dy = torch.ones(2, 3), torch.full((2, 3), math.inf)
    row_map = torch.tensor([[0, -1], [1, -1]], dtype=torch.int32)
    probs = torch.tensor([[0.5, math.inf], [0.25, math.nan]])
    assert torch.equal(moe_unpermute(x, row_map, probs=probs), torch.tensor([[0.5] * 3, [0.25] * 3]))
    back = moe_unpermute_bwd(dy, x, row_map, probs=probs)
    assert torch.equal(back.dprobs, torch.tensor([[math.inf, 0.0], [math.inf, 0.0]]))


def test_permute_then_unpermute_gives_top_k_times_the_tokens() -> None:
    x, indices = randn(10, 4), torch.stack([torch.arange(10) % 3, torch.arange(10) % 4], 1)
    made = moe_permute(x, indices)
    assert torch.equal(moe_unpermute(made.permuted, made.row_map), 2 * x)
    # The permutation's gradient is the unpermutation: <P x, y> = <x, U y>, in integers, where both are exact.
    y, xi = (torch.randint(-9, 9, s).float() for s in ((20, 4), (10, 4)))
    left = (moe_permute(xi, indices).permuted * y).sum()
    assert left == (xi * moe_unpermute(y, made.row_map)).sum()


def test_moe_of_nothing() -> None:
    none = torch.zeros(0, 2, dtype=torch.int32)
    made = moe_permute(torch.zeros(0, 4), none, probs=torch.zeros(0, 2), capacity=3)
    assert made.permuted.shape == (3, 4) and made.row_map.shape == (0, 2) and not made.probs.any()
    dropped = torch.full((5, 2), -1, dtype=torch.int32)
    assert not moe_unpermute(torch.zeros(0, 4), dropped).any()
    back = moe_unpermute_bwd(torch.ones(5, 4), torch.zeros(0, 4), dropped, probs=torch.ones(5, 2))
    assert back.dinput.shape == (0, 4) and not back.dprobs.any()
    assert moe_permute(torch.ones(3, 4), torch.zeros(3, 0, dtype=torch.int32)).permuted.shape == (0, 4)


@pytest.mark.parametrize("quantizer", [CurrentQuantizer(), BlockQuantizer(), MXFP8Quantizer(), NVFP4Quantizer()])
def test_scales_move_with_their_rows(quantizer: Any) -> None:
    x = quantize(randn(4, 256) * torch.logspace(-3, 3, 4)[:, None], quantizer, usage="row")
    indices = torch.tensor([[1], [0], [1], [-1]])
    made = moe_permute(x, indices).permuted
    assert made.shape == (4, 256) and made.scaling == x.scaling and made.col_data is None
    want = dequantize(x)[[1, 0, 2]]
    assert torch.equal(dequantize(made), torch.cat([want, torch.zeros(1, 256)]))


def test_blocks_that_span_rows_are_refused() -> None:
    tiles = quantize(randn(4, 8), BlockQuantizer(two_d=True), usage="row")
    with pytest.raises(ValueError, match="block_2d"):
        moe_permute(tiles, torch.zeros(4, 1, dtype=torch.int32))
