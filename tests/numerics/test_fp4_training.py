# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""NVFP4's Hadamard transform and stochastic rounding: what the contract promises, of both implementations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_dispatch_reference.quantize as of_reference
import te_dispatch_torch.quantize as of_torch
from te_dispatch import ops
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.manifest import Manifest
from te_dispatch.numerics import hadamard
from te_dispatch.numerics.quantized import Quantized, single_copy
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
)

BACKENDS = pytest.mark.parametrize("backend", (of_torch, of_reference), ids=("torch", "reference"))
MATRIX = torch.tensor(hadamard.matrix(), dtype=torch.float64)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """float64 (K, M): blocks of 16 rows of (M, K) times the matrix, transposed."""
    columns = x.double().t()
    return (columns.reshape(columns.shape[0], -1, 16) @ MATRIX).reshape(columns.shape)


def values(made: Quantized, side: str) -> torch.Tensor:
    """float64 values of one copy as it is stored."""
    record = single_copy(made, side)
    found = ops.dequantize(record, dtype=torch.float32).double()
    return found if side == "row" else found.t()


def test_the_matrix_is_orthogonal_and_hadamards() -> None:
    assert torch.equal(MATRIX @ MATRIX.t(), torch.eye(16, dtype=torch.float64))
    assert set(MATRIX.abs().flatten().tolist()) == {0.25}
    signs = torch.tensor(hadamard.SIGNS, dtype=torch.float64)
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    assert torch.equal(MATRIX, signs[:, None] * sylvester / 4)


@BACKENDS
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_column_wise_copy_is_of_the_rotated_matrix(backend: Any, dtype: torch.dtype) -> None:
    """Its scale is of the rotated amax, and codes are nearest: within half the widest spacing, 1, and what saturates
    beyond 6 where a block's scale was rounded down, by up to 2^-4 of 6, in units of the block's scale."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    made = backend.quantize(x, NVFP4HadamardQuantizer(), usage="both")
    assert made.scaling == "nvfp4_rht" and made.global_scale_inv.shape == (2,)
    want = rotated(x)
    want = want.float().to(dtype).double() if dtype == torch.bfloat16 else want
    for place, amax in enumerate((x.double().abs().max(), want.abs().max())):
        assert made.global_scale_inv[place].item() == pytest.approx(amax.item() / 2688, rel=4 * 2.0**-24)
    scale = ops.dequantize(_of_codes(made)).double().t()
    assert ((values(made, "column") - want).abs() <= (1 + 6 * 2.0**-4) * scale).all()
    plain = backend.quantize(x, NVFP4Quantizer(), usage="row")
    assert torch.equal(made.row_data, plain.row_data) and torch.equal(made.row_scale_inv, plain.row_scale_inv)
    assert made.global_scale_inv[0] == plain.global_scale_inv[0]


def _of_codes(made: Quantized) -> Quantized:
    """The column-wise copy with the code of 1.0 everywhere: its values are the scales."""
    record = single_copy(made, "column")
    record.col_data = torch.full_like(record.col_data, 0x22)
    return record


def on_the_grid(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (M, K) whose rotated values are FP4's, with a 6 in each block: its cast is exact. And those values."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    chosen = grid[torch.randint(len(grid), (columns, rows), generator=generator)].double()
    chosen[:, ::16] = 6.0
    back = (chosen.reshape(columns, -1, 16) @ MATRIX.t()).reshape(columns, rows).t()
    return back.float().contiguous(), chosen


@BACKENDS
def test_the_rotation_cancels_in_a_product_over_the_rows(backend: Any) -> None:
    """Exact operands: what is left is the rounding of S, of its inverse and of the sums."""
    x, codes = on_the_grid(64, 48, 2)
    dy, _ = on_the_grid(64, 32, 3)
    made = [backend.quantize(t, NVFP4HadamardQuantizer(), usage="column") for t in (dy, x)]
    assert torch.allclose(values(made[1], "column"), codes, rtol=4 * 2.0**-24, atol=0.0)
    found = ops.gemm(*(single_copy(m, "column") for m in made), layout="TN", out_dtype=torch.float32).out
    reach = rotated(dy).abs() @ rotated(x).abs().t()
    assert ((found.double() - dy.double().t() @ x.double()).abs() <= (64 + 12) * 2.0**-24 * reach).all()


@BACKENDS
def test_an_outlier_is_spread_over_its_block(backend: Any) -> None:
    x = torch.zeros(16, 3)
    x[5, 1] = 24.0
    made = backend.quantize(x, NVFP4HadamardQuantizer(), usage="column")
    assert torch.allclose(values(made, "column").abs(), torch.tensor([0.0, 6.0, 0.0])[:, None].double(), rtol=1e-6)


@BACKENDS
def test_only_the_copies_that_are_made_are_written(backend: Any) -> None:
    x = torch.randn(32, 32)
    assert backend.quantize(x, NVFP4HadamardQuantizer(), usage="row").global_scale_inv[1] == 0
    assert backend.quantize(x, NVFP4HadamardQuantizer(), usage="column").global_scale_inv[0] == 0
    out = backend.quantize(x, NVFP4HadamardQuantizer(), usage="both")
    before = out.global_scale_inv.clone()
    backend.quantize(x * 2, NVFP4HadamardQuantizer(), usage="row", out=out)
    assert out.global_scale_inv[0] != before[0] and out.global_scale_inv[1] == before[1]


def quantizers() -> list[Any]:
    return [
        DelayedQuantizer("e5m2", scale=torch.ones(1)), CurrentQuantizer(), BlockQuantizer(), BlockQuantizer(two_d=True),
        MXFP8Quantizer(), NVFP4Quantizer(), NVFP4Quantizer(two_d=True), NVFP4HadamardQuantizer(),
    ]  # fmt: skip


def state(seed: int, offset: int = 0) -> torch.Tensor:
    return torch.tensor([seed, offset])


@BACKENDS
@pytest.mark.parametrize("quantizer", quantizers(), ids=lambda q: f"{q.kind}-{q.scaling}")
def test_equal_states_draw_alike_and_others_do_not(backend: Any, quantizer: Any) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    made = [
        backend.quantize(x, quantizer, usage="both", rng_state=s) for s in (state(1), state(1), state(2), state(1, 1))
    ]
    for name in ("row_data", "col_data"):
        assert torch.equal(getattr(made[0], name), getattr(made[1], name))
        assert not torch.equal(getattr(made[0], name), getattr(made[2], name))
        assert not torch.equal(getattr(made[0], name), getattr(made[3], name))
    nearest = backend.quantize(x, quantizer, usage="both")
    for name in ("row_scale_inv", "col_scale_inv"):
        assert torch.equal(getattr(made[0], name), getattr(nearest, name))


#: Standard deviations of a binomial count: beyond it lies one draw in 10^9.
SIX = 6.0


@BACKENDS
@pytest.mark.parametrize("position", (0.0625, 0.25, 0.5, 0.875))
@pytest.mark.parametrize("lower", (0.0, 0.5, 2.0, 4.0))
def test_the_probability_of_rounding_up_is_the_position(backend: Any, position: float, lower: float) -> None:
    """Elements of one call, and calls with states of their own; and neighbours are independent of each other."""
    upper = {0.0: 0.5, 0.5: 1.0, 2.0: 3.0, 4.0: 6.0}[lower]
    x = torch.full((256, 256), lower + position * (upper - lower))
    x[:, ::16] = 6.0  # S is 448 then, and each block's scale 1
    drawn = x[0] != 6.0
    made = [backend.quantize(x, NVFP4Quantizer(), usage="row", rng_state=state(i, 7)) for i in range(8)]
    ups = torch.stack([values_of_row(record)[:, drawn] > lower + 1e-4 for record in made]).double()
    for events, p in ((ups, position), (ups[..., 1:] * ups[..., :-1], position**2), (ups[1:] * ups[:-1], position**2)):
        n = events.numel()
        # Products of neighbours share factors: the variance of their sum is at most three times that of as many alone.
        limit = SIX * math.sqrt(n * p * (1 - p)) * (1 if events is ups else math.sqrt(3))
        assert abs(events.sum().item() - n * p) <= limit


def values_of_row(made: Quantized) -> torch.Tensor:
    return ops.dequantize(made, dtype=torch.float32)


@BACKENDS
@pytest.mark.parametrize("encoding", ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
def test_values_of_the_encoding_stay_and_others_saturate(backend: Any, encoding: str) -> None:
    quantizer = DelayedQuantizer(encoding, scale=torch.ones(1))
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    record = Quantized(
        codes, None, torch.ones(1), None, encoding, "tensor", "canonical", (16, 16), torch.float32, codes.device
    )
    x = ops.dequantize(record, dtype=torch.float32)
    x = torch.where(x.isinf(), 1e9, x)
    nearest = backend.quantize(x, quantizer, usage="row").row_data
    for i in range(4):
        assert torch.equal(backend.quantize(x, quantizer, usage="row", rng_state=state(i)).row_data, nearest)


@BACKENDS
def test_a_mean_of_casts_comes_to_the_tensor(backend: Any) -> None:
    """The error of a mean of n casts has standard deviation at most spacing / 2 / sqrt(n); spacings are at most 2 of a
    block's scale. Values saturate where the block's scale was rounded down: those are left out."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    n, total = 64, torch.zeros(64, 64, dtype=torch.float64)
    for i in range(n):
        total += values_of_row(backend.quantize(x, NVFP4Quantizer(), usage="row", rng_state=state(11, i))).double()
    made = backend.quantize(x, NVFP4Quantizer(), usage="row")
    made.row_data = torch.full_like(made.row_data, 0x22)
    scale = values_of_row(made).double()
    inside = x.abs() < 6 * scale
    error = (total / n - x.double()).abs()
    assert inside.float().mean() > 0.9
    assert (error <= SIX * scale / math.sqrt(n))[inside].all()


@BACKENDS
def test_bad_arguments(backend: Any) -> None:
    x = torch.randn(24, 32)
    with pytest.raises(ValueError, match=r"x: got 24 rows .* expected a multiple of 16"):
        backend.quantize(x, NVFP4HadamardQuantizer(), usage="column")
    with pytest.raises(ValueError, match=r"splits\[1\]: got 8 rows"):
        backend.split_quantize(x, [16, 8], [NVFP4HadamardQuantizer()] * 2, usage="both")
    with pytest.raises(ValueError, match=r"xs\[0\]: got 24 rows"):
        backend.multi_tensor_quantize([x], [NVFP4HadamardQuantizer()], usage="both")
    with pytest.raises(ValueError, match=r"amax: given with a nvfp4_rht quantizer"):
        backend.quantize(x, NVFP4HadamardQuantizer(), usage="row", amax=torch.ones(1))
    with pytest.raises(ValueError, match=r"rng_state: got dtype torch.float32"):
        backend.quantize(x, NVFP4Quantizer(), usage="row", rng_state=torch.ones(2))
    with pytest.raises(ValueError, match=r"rng_state: got shape \(1,\)"):
        backend.quantize(x, NVFP4Quantizer(), usage="row", rng_state=torch.ones(1, dtype=torch.int64))
    backend.quantize(x, NVFP4HadamardQuantizer(), usage="row")  # no block of rows is read
    column = backend.quantize(x[:16], NVFP4HadamardQuantizer(), usage="column")
    with pytest.raises(ValueError, match=r"x: has only the column-wise copy of nvfp4_rht"):
        backend.dequantize(column)
    with pytest.raises(ValueError, match=r"a: got nvfp4_rht scaling"):
        ops.gemm(column, column, layout="TN")
    with pytest.raises(ValueError, match=r"x: has no row-wise copy"):
        single_copy(column, "row")
    with pytest.raises(ValueError, match=r"x: got tensor scaling, expected nvfp4_rht"):
        single_copy(backend.quantize(x, CurrentQuantizer(), usage="row"), "row")


#: Operators that cast, or read what a cast made -> the fact that says so.
CASTING = {
    **dict.fromkeys(("quantize", "quantize_dbias", "activation_fwd", "activation_bwd"), "quantizer"),
    **dict.fromkeys(("layernorm_fwd", "rmsnorm_fwd"), "quantizer"),
    **dict.fromkeys(("split_quantize", "multi_tensor_quantize"), "quantizers"),
    "dequantize": "x.scaling",
}


@pytest.mark.parametrize("package", ("te_dispatch_triton", "te_dispatch_cuda"))
def test_kernels_that_do_not_rotate_decline_by_their_requirements(package: str) -> None:
    manifest: Manifest = pytest.importorskip(package).MANIFEST
    device = DeviceFacts("cuda", "nvidia", "sm_100")
    declined = set()
    for implementation in manifest.implementations:
        op = implementation.op.partition("@")[0]
        if op in CASTING:
            call = {CASTING[op]: "nvfp4_rht"}
            conditions = [c for c in implementation.requires if CASTING[op] in c.reads()]
            assert [c.check(call, device).holds for c in conditions] == [False], op
            assert all(c.check({CASTING[op]: "nvfp4"}, device).holds for c in conditions), op
            declined.add(op)
    assert declined == set(CASTING)
