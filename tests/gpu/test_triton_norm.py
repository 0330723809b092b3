# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms of the Triton backend in the sizes that choose its kernels, judged by the conformance kit's bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import norm as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

norm = pytest.importorskip("te_dispatch_triton.norm")
gradients = pytest.importorskip("te_dispatch_triton.norm_gradients")
quantize = pytest.importorskip("te_dispatch_triton.quantize")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
QUANTIZERS: dict[str, Any] = {
    "delayed": lambda: DelayedQuantizer(scale=torch.full((1,), 3.0, device=DEVICE), amax=torch.zeros(1, device=DEVICE)),
    "current": CurrentQuantizer,
    "block_1d": BlockQuantizer,
    "block_2d": lambda: BlockQuantizer(two_d=True),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
}


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + columns)
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype) * 3 + 5
    return x, torch.randn(columns, device=DEVICE, dtype=dtype), torch.randn(columns, device=DEVICE, dtype=dtype)


def near(actual: torch.Tensor, known: Known) -> None:
    actual = actual.cpu()
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [8, 768, 4096, 8192, 20480, 70001])
def test_rows_of_any_length(columns: int, dtype: torch.dtype) -> None:
    x, gamma, beta = operands(300, columns, dtype)
    result = norm.layernorm_fwd(x, gamma, beta)
    on_host = [tensor.cpu() for tensor in (x, gamma, beta, result.mean, result.rstd)]
    expected = bounds.forward(Known.exactly(on_host[0]), *on_host[1:3], 1e-5, False, True)
    near(result.y, expected.y)
    near(result.rstd, expected.rstd)
    dy = torch.randn_like(x)
    made = gradients.layernorm_bwd(dy, x, gamma, result.mean, result.rstd, add=x)
    known = bounds.backward(dy.cpu(), on_host[0], on_host[1], *on_host[3:], False, on_host[0])
    for name in ("dx", "dgamma", "dbeta"):
        near(getattr(made, name), getattr(known, name))


@pytest.mark.parametrize("shape", [(512, 4096), (513, 1000), (64, 40000)], ids=str)
@pytest.mark.parametrize("usage", ["row", "column", "both"])
@pytest.mark.parametrize("cast", QUANTIZERS)
def test_casts_have_the_bytes_of_their_own_row_and_a_cast(cast: str, usage: str, shape: tuple[int, int]) -> None:
    """Of the row that the call's own statistics give: kernels that go through rows differently add in other orders."""
    x, gamma, beta = operands(*shape, torch.bfloat16)
    x[3, 5], x[7, 1] = torch.inf, torch.nan
    fused, apart = QUANTIZERS[cast](), QUANTIZERS[cast]()
    result = norm.layernorm_fwd(x, gamma, beta, residual=x, quantizer=fused, usage=usage, with_y=True)
    plain = norm.layernorm_fwd(x, gamma, beta, residual=x)
    finite = plain.mean.isfinite()
    for name in ("mean", "rstd"):
        torch.testing.assert_close(getattr(result, name)[finite], getattr(plain, name)[finite], rtol=1e-5, atol=1e-5)
    y = row(result, gamma, beta)
    assert torch.equal(result.y.nan_to_num(7.0), y.bfloat16().nan_to_num(7.0))
    expected = quantize.quantize(y, apart, usage=usage)
    for name in COPIES:
        left, right = getattr(result.y_quantized, name), getattr(expected, name)
        assert (left is None) == (right is None) and (left is None or torch.equal(left, right)), name
    if cast == "delayed":
        assert torch.equal(fused.amax, apart.amax)


def row(result: Any, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """RN32((x - mean) rstd gamma + beta), where the product with gamma is not rounded: exact in fp64."""
    of_unit = (result.residual_out.float() - result.mean[:, None]) * result.rstd[:, None]
    return (of_unit.double() * gamma.double() + beta.double()).float()


def test_the_same_bits_again_and_in_a_graph() -> None:
    x, gamma, beta = operands(4096, 4096, torch.bfloat16)
    first = norm.layernorm_fwd(x, gamma, beta, quantizer=CurrentQuantizer(), usage="both")
    of_first = gradients.layernorm_bwd(x, x, gamma, first.mean, first.rstd)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = norm.layernorm_fwd(x, gamma, beta, quantizer=CurrentQuantizer(), usage="both")
        of_again = gradients.layernorm_bwd(x, x, gamma, again.mean, again.rstd)
    graph.replay()
    assert torch.equal(first.y_quantized.col_data, again.y_quantized.col_data)
    for name in ("dx", "dgamma", "dbeta"):
        assert torch.equal(getattr(of_first, name), getattr(of_again, name))
