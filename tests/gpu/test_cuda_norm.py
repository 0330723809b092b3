# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms of the cuda backend in the sizes that choose its kernels, judged by the conformance kit's bounds.

The kit's own shapes are small: they reach neither rows of several warps, nor rows that are read three times, nor the
kernel that casts by columns in one pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import norm as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer

norm = pytest.importorskip("te_dispatch_cuda.norm")
quantize = pytest.importorskip("te_dispatch_cuda.quantize")
forms = pytest.importorskip("te_dispatch_cuda.quantize_forms")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
#: A lane, a warp, several warps, a whole block, beyond registers, odd, and none.
COLUMNS = (8, 256, 768, 2048, 4096, 8192, 16384, 20480, 65536, 65544, 70001)
FLOATS = (torch.bfloat16, torch.float32)


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + columns)
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype) * 3 + 5
    return x, torch.randn(columns, device=DEVICE, dtype=dtype), torch.randn(columns, device=DEVICE, dtype=dtype)


def near(actual: torch.Tensor, known: Known) -> None:
    actual = actual.cpu()
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_of_any_length(columns: int, dtype: torch.dtype) -> None:
    x, gamma, beta = operands(37, columns, dtype)
    result = norm.layernorm_fwd(x, gamma, beta)
    on_host = [tensor.cpu() for tensor in (x, gamma, beta, result.mean, result.rstd)]
    expected = bounds.forward(Known.exactly(on_host[0]), *on_host[1:3], 1e-5, False, True)
    near(result.y, expected.y)
    near(result.rstd, expected.rstd)
    dy = torch.randn_like(x)
    gradients = norm.layernorm_bwd(dy, x, gamma, result.mean, result.rstd)
    known = bounds.backward(dy.cpu(), on_host[0], on_host[1], *on_host[3:], False, None)
    for name in ("dx", "dgamma", "dbeta"):
        near(getattr(gradients, name), getattr(known, name))


@pytest.mark.parametrize("columns", [256, 768, 4096, 8192, 14336, 16384])
@pytest.mark.parametrize("rows", [16, 4240, 8192, 37])
def test_casts_by_columns_are_transposes(rows: int, columns: int) -> None:
    """One pass or two: codes are those of a cast of the fp32 y, by rows and by columns, and so is the amax."""
    x, gamma, beta = operands(rows, columns, torch.bfloat16)
    residual = torch.randn_like(x)
    scale, amax = torch.full((1,), 16.0, device=DEVICE), torch.zeros(1, device=DEVICE)
    quantizer = DelayedQuantizer(scale=scale, amax=amax)
    options: Any = {"residual": residual, "out_dtype": torch.float32, "with_y": True}
    result = norm.layernorm_fwd(x, gamma, beta, quantizer=quantizer, usage="both", **options)
    y = result.y
    assert amax.item() == y.abs().max().item()
    found, expected = result.y_quantized, quantize.quantize(y, quantizer, usage="row")
    assert torch.equal(found.row_data, expected.row_data)
    assert torch.equal(found.col_data, expected.row_data.t())
    assert torch.equal(found.row_scale_inv, expected.row_scale_inv)
    lone = norm.layernorm_fwd(x, gamma, beta, quantizer=quantizer, usage="column", **options).y_quantized
    assert lone.row_data is None
    assert torch.equal(lone.col_data, found.col_data)


@pytest.mark.parametrize("columns", [8, 256, 768, 4096, 5120, 8192, 16384, 20480])
@pytest.mark.parametrize("centered", [True, False], ids=["layernorm", "rmsnorm"])
def test_current_scaling_casts_the_same_y(columns: int, centered: bool) -> None:
    """The pass for statistics and amax, in every way to spread a row, and the cast that makes y again."""
    x, gamma, beta = operands(1000, columns, torch.bfloat16)
    quantizer = CurrentQuantizer()
    options: Any = {"out_dtype": torch.float32, "with_y": True, "residual": torch.randn_like(x)}
    run = partial(norm.layernorm_fwd, x, gamma, beta) if centered else partial(norm.rmsnorm_fwd, x, gamma)
    result = run(quantizer=quantizer, usage="both", **options)
    expected = forms.transpose_quantized(quantize.quantize(result.y, quantizer, usage="row"))
    for name in ("row_data", "col_data", "row_scale_inv"):
        assert torch.equal(getattr(result.y_quantized, name), getattr(expected, name))


def test_repeated_backwards_are_equal() -> None:
    x, gamma, beta = operands(8192, 4096, torch.bfloat16)
    result = norm.layernorm_fwd(x, gamma, beta)
    dy = torch.randn_like(x)
    first = norm.layernorm_bwd(dy, x, gamma, result.mean, result.rstd)
    for _ in range(5):
        again = norm.layernorm_bwd(dy, x, gamma, result.mean, result.rstd)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
