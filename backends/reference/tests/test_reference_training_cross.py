# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The torch backend's training operators against the reference: by bits where they move data, else within a bound.

Bounds. The torch backend computes in fp32 (u = 2^-24 relative per operation) and rounds once to the result's dtype
(unit roundoff r); the reference rounds its exact value once too. So a chain of n operations whose terms have the
magnitudes `size` differs by at most n u size, plus both final roundings, 2 r |result|, plus half a subnormal each.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, MXFP8Quantizer, NVFP4Quantizer
from te_dispatch_reference import training as reference
from te_dispatch_reference.quantize import quantize

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
U = 2.0**-24
ROUNDOFF = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SUBNORMAL = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@pytest.fixture
def ours() -> ModuleType:
    pytest.importorskip("te_dispatch_torch", reason="compares with the torch backend, which is not installed")
    from te_dispatch_torch import training

    return training


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def within(found: torch.Tensor, want: torch.Tensor, operations: int, size: torch.Tensor) -> None:
    """The module's bound, element by element."""
    assert found.dtype == want.dtype and found.shape == want.shape
    limit = operations * U * size + 2 * ROUNDOFF[want.dtype] * want.double().abs() + 2 * HALF_SUBNORMAL[want.dtype]
    error = (found.double() - want.double()).abs()
    assert (error <= limit).all(), f"{float(error.max())} beyond {float(limit[error > limit].min())}"


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    views = [x.contiguous().view(-1).view(torch.uint8) if x.numel() else x for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*views)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_dropout_add_fwd(ours: ModuleType, dtype: torch.dtype, p: float) -> None:
    """Draws are each backend's own; where both keep, values agree (add, 1 / (1 - p), times, add), and where one drops,
    its result is the residual by bits.
    """
    x, residual, bias = (randn(*s, seed=n).to(dtype) for n, s in enumerate([(40, 50), (40, 50), (50,)]))
    call: dict[str, Any] = {"bias": bias, "dropout_p": p, "rng_state": torch.tensor([3, 4])}
    got, want = (module.dropout_add_fwd(x, residual, **call) for module in (ours, reference))
    size = (x.double().abs() + bias.double().abs()) / (1 - p) + residual.double().abs()
    if p == 0.0:
        assert got.mask is want.mask is None
        within(got.out, want.out, 2, size)
        return
    both = (got.mask == 1) & (want.mask == 1)
    assert both.any() and not torch.equal(got.mask, want.mask)
    within(got.out[both], want.out[both], 4, size[both])
    for made in (got, want):
        assert torch.equal(made.out[made.mask == 0], residual[made.mask == 0]) and (made.mask == 0).any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_add_bwd(ours: ModuleType, dtype: torch.dtype) -> None:
    dy, mask = randn(40, 50).to(dtype), (randn(40, 50, seed=1) > 0).to(torch.uint8)
    half = [module.dropout_add_bwd(dy, mask, dropout_p=0.5) for module in (ours, reference)]
    assert same_bits(*half), "times 2 is exact"
    got, want = (module.dropout_add_bwd(dy, mask, dropout_p=0.1) for module in (ours, reference))
    within(got, want, 2, dy.double().abs() / 0.9)
    assert same_bits(ours.dropout_add_bwd(dy), reference.dropout_add_bwd(dy))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_master", [False, True])
@pytest.mark.parametrize("adam_w", [False, True])
def test_multi_tensor_adam(ours: ModuleType, dtype: torch.dtype, with_master: bool, adam_w: bool) -> None:
    """One step. The gradient takes two operations, the average three on terms of |m| and |g|, the square four on
    terms that are all positive, which the root halves. The quotient of both: the two corrections, the root, the sum
    and the division, five more, besides the average's own error over the root. Then weight decay, lr, and the sum.
    """
    options: dict[str, Any] = {"lr": 0.01, "beta2": 0.99, "eps": 1e-4, "step": 3, "weight_decay": 0.1}
    start = [randn(6, 9), randn(5)]
    sides = []
    for module in (ours, reference):
        weights = [w.to(dtype, copy=True) for w in start]
        master = [w.clone() for w in start] if with_master else None
        moments = [[randn(*w.shape, seed=1) for w in start], [randn(*w.shape, seed=2).abs() for w in start]]
        grads = [randn(*w.shape, seed=3).to(dtype) for w in start]
        module.multi_tensor_adam(weights, grads, *moments, master=master, adam_w=adam_w, **options)
        sides.append((weights, moments, master, grads))
    for i, w in enumerate(start):
        (got, got_moments, got_master, grads), (want, moments, master, _) = sides
        g = grads[i].double().abs() + (0.0 if adam_w else 0.1 * w.double().abs())
        m = randn(*w.shape, seed=1).double().abs() + g
        v = moments[1][i].double()
        within(got_moments[0][i], moments[0][i], 5, m)
        within(got_moments[1][i], moments[1][i], 8, v + 0.01 * g**2)
        root = (v / (1 - 0.99**3)).sqrt() + 1e-4
        # Average's 5, square's 8 / 2, five of the quotient, two of weight decay, lr and the sum.
        update = m / (1 - 0.9**3) / root + 0.1 * w.double().abs()
        size = 0.01 * update + w.double().abs() / 8  # the sum alone sees w: 2 of 18 operations
        within(got[i], want[i], 18, size)
        if with_master:
            within(got_master[i], master[i], 18, size)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_multi_tensor_l2norm(ours: ModuleType, dtype: torch.dtype, per_tensor: bool) -> None:
    """A square and at most n additions each, all positive, halved by the root; then the norms' own squares and sum."""
    tensors = [randn(20, 30).to(dtype), randn(70, seed=1).to(dtype)]
    got, want = (m.multi_tensor_l2norm(tensors, per_tensor=per_tensor) for m in (ours, reference))
    within(got, want, (600 + 1) // 2 + 6, want.double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out", FLOATS)
def test_multi_tensor_scale(ours: ModuleType, dtype: torch.dtype, out: torch.dtype) -> None:
    """The scale may be rounded to fp32, and the product is."""
    inputs = [randn(20, 30).to(dtype), randn(70, seed=1).to(dtype)]
    inputs[1][3] = torch.inf
    made = []
    for module in (ours, reference):
        outputs, flag = [torch.empty(t.shape, dtype=out) for t in inputs], torch.zeros(1)
        module.multi_tensor_scale(inputs, outputs, 0.3, noop_flag=flag)
        assert flag.item() == 1 and outputs[1][3] == torch.inf
        outputs[1][3] = 0
        made.append(outputs)
    for got, want in zip(*made, strict=True):
        within(got, want, 2, want.double().abs())


def choices(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("capacity", [None, 0, 13, 200])
@pytest.mark.parametrize("dtype", FLOATS)
def test_moe_permute(ours: ModuleType, dtype: torch.dtype, capacity: int | None) -> None:
    x, indices, probs = randn(32, 8).to(dtype), choices(32, 5, 3), randn(32, 3).to(dtype)
    got, want = (m.moe_permute(x, indices, probs=probs, capacity=capacity) for m in (ours, reference))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("quantizer", [CurrentQuantizer(), BlockQuantizer(), MXFP8Quantizer("e5m2"), NVFP4Quantizer()])
def test_moe_permute_of_quantized_rows(ours: ModuleType, quantizer: Any) -> None:
    x, indices = quantize(randn(32, 256), quantizer, usage="row"), choices(32, 5, 3)
    got, want = (m.moe_permute(x, indices, capacity=100) for m in (ours, reference))
    assert same_bits(got.row_map, want.row_map)
    for name in Quantized.__slots__:
        a, b = getattr(got.permuted, name), getattr(want.permuted, name)
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b, name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_probs", [False, True])
def test_moe_unpermute(ours: ModuleType, dtype: torch.dtype, with_probs: bool) -> None:
    """Three products and three additions per element; the gradient of x one product, of probs 16 of both."""
    row_map = reference.moe_permute(torch.zeros(32, 1), choices(32, 5, 3), capacity=70).row_map
    x, dy, probs = randn(70, 16).to(dtype), randn(32, 16).to(dtype), randn(32, 3).to(dtype)
    given = probs if with_probs else None
    found = x[row_map.clamp_min(0).long()].double().abs() * (row_map >= 0)[..., None]
    got, want = (m.moe_unpermute(x, row_map, probs=given) for m in (ours, reference))
    within(got, want, 6, (found * (probs.double().abs()[..., None] if with_probs else 1.0)).sum(1))
    got, want = (m.moe_unpermute_bwd(dy, x, row_map, probs=given) for m in (ours, reference))
    within(got.dinput, want.dinput, 1, want.dinput.double().abs())
    assert (got.dprobs is None) == (want.dprobs is None) == (not with_probs)
    if with_probs:
        within(got.dprobs, want.dprobs, 32, (found * dy.double().abs()[:, None]).sum(-1))


def test_a_dropped_choice_counts_nothing_in_either(ours: ModuleType) -> None:
    """0 times Inf used to give the torch backend NaN."""
    x, dy = torch.ones(2, 3), torch.full((2, 3), torch.inf)
    row_map = torch.tensor([[0, -1], [1, -1]], dtype=torch.int32)
    probs = torch.tensor([[0.5, torch.inf], [0.25, torch.nan]])
    for module in (ours, reference):
        assert module.moe_unpermute(x, row_map, probs=probs)[:, 0].tolist() == [0.5, 0.25]
        back = module.moe_unpermute_bwd(dy, x, row_map, probs=probs)
        assert back.dprobs[:, 1].tolist() == [0.0, 0.0]
