# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators on AMD's chips: the kernels' machine code, executed by `gfx_emulator` on CPU tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import norm as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.certification import certify
from te_dispatch.conformance.rules import judge
from te_dispatch.conformance.settings import Settings
from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch_torch import activation as portable_activation
from te_dispatch_torch import quantize as portable
from te_dispatch_triton import emulation

pytestmark = [pytest.mark.compiles]
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


@pytest.fixture(params=["gfx942", "gfx950"])
def emulator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A chip; its name is the test's parameter."""
    reason = emulation.missing()
    if reason is not None:
        pytest.skip(reason)
    from te_dispatch_triton.crosscompile import emulated

    with emulated.emulated(request.param) as found:
        yield found


def numbers(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16() * scale


def near(actual: torch.Tensor, known: Known) -> None:
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


def every_number() -> torch.Tensor:
    """Every bfloat16, Inf and each NaN included: (256, 256)."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)


def test_garbage_is_collected_as_before_when_the_chip_is_left() -> None:
    reason = emulation.missing()
    if reason is not None:
        pytest.skip(reason)
    from te_dispatch_triton.crosscompile import emulated

    before = gc.get_threshold()
    with emulated.emulated("gfx942"):
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("encoding", FP8_ENCODINGS)
@pytest.mark.sampled(4)
def test_every_16_bit_value_is_cast_to_the_portable_bytes(emulator: Any, encoding: str) -> None:
    x = every_number()
    made, expected = (
        module.quantize(x, DelayedQuantizer(encoding, scale=torch.full((1,), 0.5), amax=torch.zeros(1)), usage="both")
        for module in (_quantize(), portable)
    )
    assert_same(made, expected)
    assert emulator.launches == ["cast_columns"]


def _quantize() -> Any:
    from te_dispatch_triton import quantize

    return quantize


def test_a_signaling_nan_costs_no_maximum(emulator: Any) -> None:
    """The chips' maximum of a number and a signaling NaN is NaN, and of that and the next number the next number."""
    x = every_number()
    for shown in (x, torch.where(x.isinf(), 0.0, x)):
        amax = torch.zeros(1)
        _quantize().quantize(shown, DelayedQuantizer(scale=torch.ones(1), amax=amax), usage="row")
        assert amax == shown[~shown.isnan()].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "block_1d", "block_2d", "nvfp4"])
def test_a_signaling_nan_costs_no_scale(emulator: Any, name: str) -> None:
    made, expected = (
        module.quantize(every_number(), CASTS[name](), usage="both") for module in (_quantize(), portable)
    )
    assert_same(made, expected)


def test_calls_are_recorded_and_replayed(emulator: Any) -> None:
    """As on a device: the third call of a signature launches without its host function."""
    plans = _quantize()._made.plans
    before, operands = plans.hits, [numbers(64, 256, seed=seed) for seed in range(4)]
    for x in operands:
        assert_same(
            _quantize().quantize(x, CurrentQuantizer(), usage="both"),
            portable.quantize(x, CurrentQuantizer(), usage="both"),
        )
    assert plans.hits == before + 2
    assert len(emulator.launches) == len(operands) * len(set(emulator.launches))


CASTS: dict[str, Any] = {
    "current": CurrentQuantizer, "current e5m2fnuz": lambda: CurrentQuantizer("e5m2fnuz"), "block_1d": BlockQuantizer,
    "block_2d": lambda: BlockQuantizer(two_d=True), "mxfp8": MXFP8Quantizer, "nvfp4": NVFP4Quantizer,
    "nvfp4 2d": lambda: NVFP4Quantizer(two_d=True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 256), (37, 300)], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_casts_have_the_portable_bytes(emulator: Any, name: str, shape: tuple[int, int]) -> None:
    if name in ("mxfp8", "nvfp4", "nvfp4 2d") and shape[0] % 32:
        shape = (96, 160)
    x, quantizer = numbers(*shape), CASTS[name]()
    assert isinstance(quantizer, Quantizer)
    assert_same(_quantize().quantize(x, quantizer, usage="both"), portable.quantize(x, quantizer, usage="both"))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [300, 5001])
def test_norms(emulator: Any, columns: int) -> None:
    """Rows that fit one program and rows that do not, forward and backward, within the kit's bounds."""
    from te_dispatch_triton import norm, norm_gradients

    x, residual = numbers(7, columns) + 5, numbers(7, columns, seed=1)
    gamma, beta = numbers(columns, seed=2).float(), numbers(columns, seed=3).float()
    result = norm.layernorm_fwd(x, gamma, beta, residual=residual, out_dtype=torch.float32)
    summed = x + residual
    assert torch.equal(result.residual_out, summed)
    known = bounds.forward(Known.exactly(summed), gamma, beta, 1e-5, False, True)
    for name in ("y", "mean", "rstd"):
        near(getattr(result, name), getattr(known, name))
    dy = numbers(7, columns, seed=4)
    gradients = norm_gradients.layernorm_bwd(dy, summed, gamma, result.mean, result.rstd, add=residual)
    expected = bounds.backward(dy, summed, gamma, result.mean, result.rstd, False, residual)
    for name in ("dx", "dgamma", "dbeta"):
        near(getattr(gradients, name), getattr(expected, name))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gelu", "relu", "silu", "swiglu"])
def test_activations(emulator: Any, kind: str) -> None:
    """Within three units of the last place of bfloat16 of the portable implementation."""
    from te_dispatch_triton import activation

    x = numbers(33, 512)
    dy = numbers(33, 256 if kind == "swiglu" else 512, seed=1)
    made, expected = (module.activation_fwd(x, kind=kind).out for module in (activation, portable_activation))
    torch.testing.assert_close(made, expected, rtol=3 * 2.0**-8, atol=2.0**-10)
    made, expected = (module.activation_bwd(dy, x, kind=kind).dx for module in (activation, portable_activation))
    torch.testing.assert_close(made, expected, rtol=3 * 2.0**-8, atol=2.0**-8)


@pytest.mark.slow
def test_attention(emulator: Any) -> None:
    """Causal, forward and backward, against PyTorch in float64 on the same bfloat16 operands."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    rows, heads, features = 96, 2, 64
    q, k, v, dout = (numbers(rows, 1, heads, features, seed=seed, scale=1.0) for seed in range(4))
    made = attention_fwd(q, k, v)
    exact = [x.double().permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    out.backward(dout.double().permute(1, 2, 0, 3))

    def close(actual: torch.Tensor, expected: torch.Tensor | None) -> None:
        assert expected is not None
        wanted = expected.permute(2, 0, 1, 3).reshape(actual.shape)
        torch.testing.assert_close(actual.double(), wanted, rtol=2.0**-7, atol=2.0**-6)

    assert made.lse is not None and made.saved is not None
    close(made.out, out.detach())
    gradients = attention_bwd(dout.reshape(made.out.shape), q, k, v, made.out, made.lse, made.saved)
    for name, operand in zip(("dq", "dk", "dv"), exact):
        close(getattr(gradients, name), operand.grad)
    assert emulator.launches == ["forward", "queries", "keys"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_softmax(emulator: Any, dtype: torch.dtype) -> None:
    from te_dispatch_triton import softmax

    x = numbers(2, 2, 16, 96).to(dtype)
    mask = torch.rand(2, 1, 16, 96, generator=torch.Generator().manual_seed(1)) < 0.3
    made = softmax.softmax_fwd(x, mask, scale=0.5)
    exact = torch.softmax((x.double() * 0.5).masked_fill(mask, -10000.0), -1)
    torch.testing.assert_close(made.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    "layout", ["NT", pytest.param("NN", marks=pytest.mark.slow), pytest.param("TN", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_products_of_integers_are_exact(emulator: Any, dtype: torch.dtype, layout: str) -> None:
    from te_dispatch_triton.gemm import gemm

    m, n, k = 70, 40, 96
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in ((m, k), (n, k)))
    exact = a.double() @ b.double().t()
    first = a.t().contiguous() if layout == "TN" else a
    second = b if layout == "NT" else b.t().contiguous()
    out = torch.zeros(m, n)
    gemm(first, second, layout=layout, out=out)
    assert torch.equal(out.double(), exact)
    assert emulator.launches == ["gemm"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["e4m3fn", "e4m3fnuz"])
def test_products_of_codes_are_exact(emulator: Any, encoding: str) -> None:
    """Integers of few bits, of which a code holds every one and fp32 the sums: on FP8 units or decoded to 16 bits."""
    from te_dispatch_triton.gemm import gemm_codes

    m, n, k = 64, 48, 128
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=generator).bfloat16() for shape in ((m, k), (n, k)))
    one = DelayedQuantizer(encoding, scale=torch.ones(1), amax=torch.zeros(1))
    codes = [portable.quantize(x, one, usage="row") for x in (a, b)]
    out = torch.zeros(m, n)
    gemm_codes(*codes, layout="NT", out=out)
    assert torch.equal(out.double(), a.double() @ b.double().t())


@pytest.mark.slow
def test_kernels_follow_addresses_in_memory(emulator: Any) -> None:
    """Several tensors cast by one launch, which has their addresses in a table."""
    tensors = [numbers(*shape, seed=seed) for seed, shape in enumerate([(16, 64), (7, 33), (128, 8)])]
    quantizers = [
        [DelayedQuantizer(scale=torch.full((1,), 2.0), amax=torch.zeros(1)) for _ in tensors] for _ in range(2)
    ]
    made = _quantize_many()(tensors, quantizers[0], usage="both")
    expected = portable.multi_tensor_quantize(tensors, quantizers[1], usage="both")
    for one, other in zip(made, expected):
        assert_same(one, other)


def _quantize_many() -> Any:
    from te_dispatch_triton.quantize_many import multi_tensor_quantize

    return multi_tensor_quantize


@pytest.mark.parametrize(
    "case",
    [
        "transpose_quantized.plain[scaling=tensor,encoding=e4m3fn,usage=row,shape=33x65,nominal=bf16]",
        "relayout_scales.plain[scaling=tensor,encoding=e4m3fn,usage=both,shape=33x65,layout=canonical,"
        "scale_layout=canonical,nominal=bf16]",
    ],
)
def test_results_that_share_an_operands_memory_change_with_it(case: str) -> None:
    """The kit asks launches of a plan on memory whose contents it exchanges."""
    reason = emulation.missing()
    if reason is not None:
        pytest.skip(reason)
    settings = Settings(("triton",), device="emulated:gfx942", isolated=False)
    operator = case.partition(".")[0]
    report = certify("triton", settings=settings, units=[Unit.parse(f"triton.{operator}/planned/{case}")])
    (outcome,) = report.outcomes
    assert outcome.state == "passed", outcome.message
    assert "nothing was planned" not in outcome.notes
