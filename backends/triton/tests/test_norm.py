# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms where the conformance kit's smoke calls do not reach: long rows, every cast, what kernels are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import norm as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch_triton import launch, norm, norm_gradients, quantize, targets

CPU = torch.device("cpu")
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
QUANTIZERS: dict[str, Any] = {
    "delayed": lambda: DelayedQuantizer(scale=torch.full((1,), 3.0), amax=torch.zeros(1)),
    "current": CurrentQuantizer,
    "block_1d": BlockQuantizer,
    "block_2d": lambda: BlockQuantizer(two_d=True),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda: NVFP4Quantizer(two_d=True),
}


def operands(rows: int, columns: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    x, residual = (torch.randn(rows, columns, generator=generator).bfloat16() * 3 + 5 for _ in range(2))
    return [x, residual, *(torch.randn(columns, generator=generator) for _ in range(2))]


def near(actual: torch.Tensor, known: Known) -> None:
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


@pytest.mark.interpreted
@pytest.mark.parametrize("columns", [1, 300, 5001])
def test_rows_of_any_length(columns: int) -> None:
    x, residual, gamma, beta = operands(7, columns)
    result = norm.layernorm_fwd(x, gamma, beta, residual=residual, out_dtype=torch.float32)
    summed = x + residual
    assert torch.equal(result.residual_out, summed)
    known = bounds.forward(Known.exactly(summed), gamma, beta, 1e-5, False, True)
    for name in ("y", "mean", "rstd"):
        near(getattr(result, name), getattr(known, name))
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    gradients = norm_gradients.layernorm_bwd(dy, summed, gamma, result.mean, result.rstd, add=residual)
    expected = bounds.backward(dy, summed, gamma, result.mean, result.rstd, False, residual)
    for name in ("dx", "dgamma", "dbeta"):
        near(getattr(gradients, name), getattr(expected, name))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape, usage", [((36, 300), "both"), ((37, 300), "row"), ((37, 300), "both"), ((2, 5000), "both")]
)
@pytest.mark.parametrize("cast", QUANTIZERS)
def test_casts_have_the_bytes_of_a_norm_and_a_cast(cast: str, usage: str, shape: tuple[int, int]) -> None:
    """In one kernel or two, by rows, by tiles or four rows at a time: the same y, and of it the same cast."""
    x, residual, gamma, beta = operands(*shape)
    fused, apart = QUANTIZERS[cast](), QUANTIZERS[cast]()
    result = norm.layernorm_fwd(x, gamma, beta, residual=residual, quantizer=fused, usage=usage, with_y=True)
    plain = norm.layernorm_fwd(x, gamma, beta, residual=residual, out_dtype=torch.float32)
    assert torch.equal(result.y, plain.y.bfloat16())
    assert torch.equal(result.mean, plain.mean) and torch.equal(result.rstd, plain.rstd)
    assert_same(result.y_quantized, quantize.quantize(plain.y, apart, usage=usage))
    if cast == "delayed":
        assert torch.equal(fused.amax, apart.amax)


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.mark.interpreted
def test_a_row_does_not_depend_on_the_others() -> None:
    for columns, cast in ((300, None), (5000, None), (300, "delayed")):
        x, _, gamma, beta = operands(9, columns)
        options: dict[str, Any] = {} if cast is None else {"usage": "both", "with_y": True}
        together, alone = (
            norm.layernorm_fwd(rows, gamma, beta, quantizer=cast and QUANTIZERS[cast](), **options)
            for rows in (x, x[4:5])
        )
        assert torch.equal(together.y[4:5], alone.y) and torch.equal(together.rstd[4:5], alone.rstd)


@pytest.mark.interpreted
def test_operands_that_do_not_lie_dense() -> None:
    x, residual, gamma, beta = operands(8, 64)
    wide = torch.stack((gamma, beta), 1)
    result = norm.layernorm_fwd(x.t()[:8].t()[:, ::2], gamma[:4], beta[:4])
    assert torch.equal(result.y, norm.layernorm_fwd(x[:, :8:2].contiguous(), gamma[:4], beta[:4]).y)
    result = norm.layernorm_fwd(x, wide[:, 0], wide[:, 1], residual=residual.t().contiguous().t())
    assert torch.equal(result.y, norm.layernorm_fwd(x, gamma, beta, residual=residual).y)


@pytest.mark.interpreted
def test_nothing_is_summed_to_zero() -> None:
    """No rows: the gradients of gamma and beta are 0, and a cast's scale is written all the same."""
    x, gamma = torch.empty(0, 16), torch.ones(16)
    gradients = norm_gradients.layernorm_bwd(x, x, gamma, x[:, 0], x[:, 0])
    assert not gradients.dgamma.any() and not gradients.dbeta.any()
    made = norm.rmsnorm_fwd(x, gamma, quantizer=CurrentQuantizer(), usage="both").y_quantized
    assert made is not None and made.row_scale_inv.item() == 1.0


def test_arguments_are_checked() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"^gamma: "):
        norm.rmsnorm_fwd(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"^add: "):
        norm_gradients.rmsnorm_bwd(x, x, torch.ones(8), torch.ones(4), add=x[:2])


def launches(arch: str, call: Any) -> list[launch.Launch]:
    found: list[launch.Launch] = []
    targets.pretend(CPU, targets.target_for("nvidia" if arch.startswith("sm") else "amd", arch, 100))
    try:
        with launch.recording(found):
            call()
    finally:
        targets.pretend(CPU, None)
    return found


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("columns", [64, 4096, 8192, 65536])
def test_pipelines_fit_shared_memory(columns: int, arch: str) -> None:
    """fp32 operands with a residual need the most."""
    x = torch.empty(64, columns)
    gamma, rstd = torch.empty(columns), torch.empty(64)
    quantizer = DelayedQuantizer(scale=torch.ones(1), amax=torch.zeros(1))
    found = launches(arch, lambda: norm.rmsnorm_fwd(x, gamma, residual=x, quantizer=quantizer))
    found += launches(arch, lambda: norm_gradients.rmsnorm_bwd(x, x, gamma, rstd, add=x))
    assert len(found) >= 3
    for made in found:
        chosen = dict(zip(launch.constant_names(made.kernel), made.constants))
        if chosen.get("STAGES", 1) > 1:
            operands = 3 if "gradients" in made.kernel.name else 2
            room = targets.target_for("nvidia" if arch.startswith("sm") else "amd", arch).shared_memory
            assert chosen["STAGES"] * operands * chosen["BM"] * chosen["BN"] * 4 < room


@pytest.mark.parametrize(
    "cast, usage, kernels",
    [
        ("delayed", "row", ["norm_rows"]),
        ("delayed", "both", ["norm_rows", "norm_columns"]),
        ("block_1d", "row", ["norm_rows"]),
        ("current", "row", ["norm_rows", "norm_cast"]),
        ("current", "both", ["norm_rows", "norm_columns"]),
        ("block_1d", "both", ["norm_rows", "norm_columns"]),
        ("mxfp8", "both", ["norm_rows", "norm_cast"]),
        ("nvfp4", "both", ["norm_rows", "norm_cast"]),
        ("block_2d", "row", ["norm_rows", "norm_cast"]),
    ],
)
def test_how_often_x_is_read(cast: str, usage: str, kernels: list[str]) -> None:
    x, gamma = torch.empty(64, 4096), torch.empty(4096)
    found = launches("sm_90", lambda: norm.rmsnorm_fwd(x, gamma, quantizer=QUANTIZERS[cast](), usage=usage))
    assert [made.kernel.name for made in found] == kernels
