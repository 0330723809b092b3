# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The triton backend's matrix products where the kit does not ask: TF32, split accumulation, sizes beyond 2^31,
captured groups, and that every configuration gives the same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
gemm_plans = pytest.importorskip("te_dispatch_triton.gemm_plans", exc_type=ImportError)

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
CURRENT = CurrentQuantizer("e4m3fn")
ON_UNITS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no FP8 units"
)


@pytest.fixture(autouse=True)
def _on_triton():
    torch.manual_seed(0)
    with te_dispatch.using(gemm="triton", grouped_gemm="triton"):
        yield


def codes(*shape: int, quantizer: Any = CURRENT, x: torch.Tensor | None = None) -> Any:
    x = torch.randn(*shape, device=DEVICE, dtype=BF16) if x is None else x
    return ops.quantize(x, quantizer, usage="both")


def test_fp32_follows_pytorch_s_setting():
    a, b = torch.randn(256, 1024, device=DEVICE), torch.randn(128, 1024, device=DEVICE)
    exact = a.double() @ b.double().t()
    before = torch.get_float32_matmul_precision()
    try:
        errors = {}
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = (ops.gemm(a, b, layout="NT").out - exact).abs().max().item()
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-3 < 5e-3 < errors["high"] < 0.2


@ON_UNITS
@pytest.mark.parametrize("shape", [(4096, 512), (200, 100)], ids=["described", "pointers"])
def test_split_accumulation_is_the_more_exact(shape):
    k = 8192 if shape[0] == 4096 else 8200
    x = torch.rand(shape[0], k, device=DEVICE, dtype=BF16) + 0.5
    y = torch.rand(shape[1], k, device=DEVICE, dtype=BF16) + 0.5
    a, b = codes(x=x), codes(x=y)
    exact = ops.dequantize(a, dtype=torch.float32).double() @ ops.dequantize(b, dtype=torch.float32).double().t()
    errors = [
        ((ops.gemm(a, b, layout="NT", out_dtype=torch.float32, split_accumulator=split).out - exact) / exact)
        .abs()
        .max()
        for split in (True, False)
    ]
    assert errors[0] < 2e-3 and errors[0] <= errors[1]


def test_an_output_beyond_32_bits(room):
    room(24)
    m, n = 70_000, 32_768
    a, b = torch.randn(m, 16, device=DEVICE, dtype=BF16), torch.randn(n, 16, device=DEVICE, dtype=BF16)
    out = ops.gemm(a, b, layout="NT").out
    torch.testing.assert_close(out[-5:], a[-5:] @ b.t(), rtol=1e-2, atol=1e-2)
    bias = torch.zeros(n, device=DEVICE, dtype=BF16)
    finished = ops.gemm(a, b, layout="NT", bias=bias, epilogue="gelu")  # not through descriptors
    torch.testing.assert_close(finished.aux[-5:], out[-5:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["half", "fp8", "fp8_split", "fp8_blocks", "fp8_blocks of rows"])
@pytest.mark.parametrize("shape", [(1024, 1024, 512), (1000, 1024, 528), (2304, 2176, 1664)], ids=str)
def test_every_configuration_gives_the_same_bits(kind, shape):
    from te_dispatch_triton.targets import target_of

    kind, _, of_rows = kind.partition(" ")
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if kind != "half" and "e4m3fn" not in target.dots:
        pytest.skip("no FP8 units")
    name = f"{kind}_described" if target.descriptors else kind
    m, n, k = shape
    if kind == "half":
        a, b = torch.randn(m, k, device=DEVICE, dtype=BF16), torch.randn(n, k, device=DEVICE, dtype=BF16)
    else:
        blocks = kind == "fp8_blocks"
        a = codes(m, k, quantizer=BlockQuantizer("e4m3fn") if blocks else CURRENT)
        b = codes(n, k, quantizer=BlockQuantizer("e4m3fn", two_d=not of_rows) if blocks else CURRENT)
    expected = None
    for choice in gemm_plans.candidates(name, target):
        gemm_plans.force(name, choice)
        try:
            found = ops.gemm(a, b, layout="NT", split_accumulator=kind == "fp8_split").out
        finally:
            gemm_plans.force(name, None)
        expected = found if expected is None else expected
        assert torch.equal(found, expected), choice
    if kind != "half":  # without a rounding to bf16
        a, b = ops.dequantize(a, dtype=torch.float32), ops.dequantize(b, dtype=torch.float32)
    torch.testing.assert_close(expected.double(), a.double() @ b.double().t(), rtol=3e-2, atol=3e-1)


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
def test_what_follows_a_product_of_a_layer_s_size(out_dtype):
    """The kit's products are small, and small ones have configurations of their own."""
    m, n, k = 2048, 3072, 512
    a, b = torch.randn(m, k, device=DEVICE, dtype=BF16), torch.randn(n, k, device=DEVICE, dtype=BF16)
    bias, old = torch.randn(n, device=DEVICE, dtype=BF16), torch.randn(m, n, device=DEVICE, dtype=out_dtype)
    exact = (a.float() @ b.float().t()).double()
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    quantized = codes(x=a), codes(x=b)
    decoded = ops.dequantize(quantized[0]).double() @ ops.dequantize(quantized[1]).double().t()
    for operands, product in (((a, b), exact), (quantized, decoded)):
        for split in (False, True):
            out = ops.gemm(*operands, layout="NT", out=old.clone(), accumulate=True, split_accumulator=split).out
            torch.testing.assert_close(out.double(), product + old.double(), rtol=2e-2, atol=0.3)
            out = ops.gemm(*operands, layout="NT", bias=bias, out_dtype=out_dtype, split_accumulator=split).out
            torch.testing.assert_close(out.double(), product + bias.double(), rtol=2e-2, atol=0.3)
    found = ops.gemm(a, b, layout="NT", bias=bias, epilogue="gelu", out_dtype=out_dtype)
    z = exact + bias.double()
    torch.testing.assert_close(found.aux.double(), z, **tolerance)
    torch.testing.assert_close(found.out.double(), torch.nn.functional.gelu(z, approximate="tanh"), **tolerance)
    x = torch.randn(m, n, device=DEVICE, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.gelu(x, approximate="tanh").backward(exact)
    found = ops.gemm(a, b, layout="NT", aux=x.detach().float(), epilogue="dgelu", out_dtype=out_dtype)
    torch.testing.assert_close(found.out.double(), x.grad, **tolerance)
    torch.testing.assert_close(found.dbias.double(), x.grad.sum(0), rtol=2e-2, atol=2.0)


@pytest.mark.parametrize("layout", ["NN", "TN"])
def test_layouts_at_a_layer_s_size(layout):
    m, n, k = 2048, 1536, 768
    a = torch.randn(*((m, k) if layout[0] == "N" else (k, m)), device=DEVICE, dtype=BF16)
    b = torch.randn(k, n, device=DEVICE, dtype=BF16)
    exact = (a if layout[0] == "N" else a.t()).float() @ b.float()
    torch.testing.assert_close(ops.gemm(a, b, layout=layout).out.float(), exact, rtol=2e-2, atol=3e-1)
    out = torch.ones(m, n, device=DEVICE)
    found = ops.gemm(a, b, layout=layout, out=out, accumulate=True, epilogue="bgrad_b")
    torch.testing.assert_close(found.out, exact + 1, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found.dbias, b.float().sum(0), rtol=1e-3, atol=1e-2)


def test_captured_groups_follow_splits_on_the_device():
    a, b = torch.randn(48, 64, device=DEVICE, dtype=BF16), [torch.randn(32, 64, device=DEVICE, dtype=BF16)] * 3
    splits = torch.tensor([16, 24, 8], device=DEVICE)
    out = [torch.empty(n, 32, device=DEVICE, dtype=BF16) for n in (16, 24, 8)]

    def call():
        ops.grouped_gemm([a], b, splits, layout="NT", out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for deal in ([16, 24, 8], [10, 20, 8]):
        splits.copy_(torch.tensor(deal))
        for x in out:
            x.fill_(7.0)
        graph.replay()
        start = 0
        for x, y, n in zip(out, b, deal):
            torch.testing.assert_close(x[:n], a[start : start + n] @ y.t(), rtol=2e-2, atol=2e-2)
            assert (x[n:] == 7.0).all()
            start += n
