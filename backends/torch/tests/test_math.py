# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""GEMM, norm, activation, softmax and rope against the reference and float64 autograd, within derived bounds.

u(dtype) is the unit roundoff: 2^-24 fp32, 2^-11 fp16, 2^-8 bf16. A sum of n fp32 terms in any order errs by at most
n u32 sum|terms| (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2); rounding the result adds
u(dtype) |result|. Elementary functions of PyTorch and elementwise chains of c operations err by a few u32 each, written
as c u32 of the largest intermediate; each test states its c.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch_backend_support import assert_same_bits

from te_dispatch.backend_kit import products as torch_products
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.activation import GATED, KINDS
from te_dispatch_torch import activation, gemm, norm, position, quantize, softmax

U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
U32 = U[torch.float32]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float, name: str = "") -> None:
    want = want.double()
    tiny = 2.0**-25 if got.dtype == torch.float16 else 2.0**-140  # half the smallest subnormal, rounded up
    limit = U[got.dtype] * want.abs() + bound + tiny
    error = (got.double() - want).abs()
    assert (error <= limit).all(), f"{name}: error {(error / limit).max().item():.2f} times the bound"


def _operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn((m, k) if layout[0] == "N" else (k, m)).to(dtype)
    b = torch.randn((n, k) if layout[1] == "T" else (k, n)).to(dtype)
    return a, b


def _exact(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and the product of absolute values, float64."""
    a, b = a.double(), b.double()
    a, b = (a.t() if layout[0] == "T" else a), (b.t() if layout[1] == "T" else b)
    return a @ b, a.abs() @ b.abs()


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(layout: str, dtype: torch.dtype) -> None:
    """k fp32 additions, one rounding; bias and accumulate are one more term each."""
    m, n, k = 33, 24, 150
    a, b = _operands(layout, m, n, k, dtype)
    product, size = _exact(a, b, layout)
    bias, start = torch.randn(n).to(dtype), torch.randn(m, n)
    for out_dtype in (None, torch.float32, torch.bfloat16):
        got = gemm.matmul(a, b, layout=layout, out_dtype=out_dtype).out
        assert got.dtype == (out_dtype or dtype)
        assert_within(got, product, k * U32 * size)
        with_bias = gemm.matmul(a, b, layout=layout, alpha=0.5, bias=bias, out_dtype=out_dtype).out
        assert_within(with_bias, product * 0.5 + bias.double(), (k + 2) * U32 * (size + bias.double().abs()))
        fused = gemm.matmul(a, b, layout=layout, bias=bias, out_dtype=out_dtype).out
        assert_within(fused, product + bias.double(), (k + 2) * U32 * (size + bias.double().abs()))
    out = start.clone()
    assert gemm.matmul(a, b, layout=layout, out=out, accumulate=True).out is out
    assert_within(out, product + start.double(), (k + 2) * U32 * (size + start.double().abs()))
    low = start.to(dtype, copy=True)
    gemm.matmul(a, b, layout=layout, out=low, accumulate=True)
    assert_within(low, product + start.to(dtype).double(), (k + 2) * U32 * (size + start.double().abs() + 1))


QUANTIZERS = {
    "tensor": CurrentQuantizer(),
    "e5m2": CurrentQuantizer("e5m2"),
    "fnuz": CurrentQuantizer("e4m3fnuz"),
    "block_1d": BlockQuantizer(),
    "block_2d": BlockQuantizer(two_d=True, power_of_two=False),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_emulated_gemm(layout: str, kind: str) -> None:
    """Values carry up to 3 roundings (scale, global scale, product of scales), then k additions."""
    reference = pytest.importorskip("te_dispatch_reference.gemm")
    a, b = _operands(layout, 48, 32, 160, torch.bfloat16)
    qa, qb = (quantize.quantize(x, QUANTIZERS[kind], usage="both") for x in (a, b))
    want = reference.gemm(qa, qb, layout=layout, out_dtype=torch.float32).out
    size = _exact(a, b, layout)[1] * 1.5  # a cast moves a value by less than half of it, up
    for out_dtype in (torch.float32, torch.bfloat16):
        got = gemm.emulated(qa, qb, layout=layout, out_dtype=out_dtype).out
        assert_within(got, want, (160 + 8) * U32 * size + U32 * want.double().abs(), kind)


def test_emulated_gemm_reads_whichever_copy_there_is() -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    both = [quantize.quantize(x, CurrentQuantizer(), usage="both") for x in (a, b)]
    want = gemm.emulated(*both, layout="NT").out
    columns = [quantize.quantize(x, CurrentQuantizer(), usage="column") for x in (a, b)]
    assert_within(gemm.emulated(*columns, layout="NT").out, want, 64 * 2 * U32 * (a.abs() @ b.abs().t()).double() * 1.5)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_scaled_mm_feeds_the_units_the_right_copies(layout: str) -> None:
    """PyTorch's CPU `_scaled_mm` multiplies the same codes; its result is rounded once to out_dtype."""
    a, b = _operands(layout, 32, 48, 64, torch.bfloat16)
    qa, qb = (quantize.quantize(x, CurrentQuantizer(), usage="both") for x in (a, b))
    want = gemm.emulated(qa, qb, layout=layout, out_dtype=torch.float32).out
    size = _exact(a, b, layout)[1] * 1.5
    got = gemm.scaled_mm(qa, qb, layout=layout, out_dtype=torch.float32, split_accumulator=True).out
    assert_within(got, want, 2 * (64 + 8) * U32 * size)
    bias = torch.randn(48)
    got = gemm.scaled_mm(qa, qb, layout=layout, alpha=0.25, bias=bias, out_dtype=torch.float32).out
    assert_within(got, want.double() * 0.25 + bias.double(), 2 * (64 + 8) * U32 * (size + bias.double().abs()))


def test_scaled_mm_hands_scales_over_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt refuses others."""
    whole = [quantize.quantize(torch.randn(32, 64), CurrentQuantizer(), usage="row") for _ in range(2)]
    odd = [copy.copy(x) for x in whole]
    for x in odd:
        x.row_scale_inv = torch.cat([torch.zeros(1), x.row_scale_inv])[1:]
    multiply, handed = torch._scaled_mm, []

    def product(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, **options: Any) -> Any:
        handed.extend((a_scale, b_scale))
        return multiply(a, b, a_scale, b_scale, **options)

    monkeypatch.setattr(torch_products, "scaled_mm", product)
    got, want = (gemm.scaled_mm(*x, layout="NT", out_dtype=torch.float32).out for x in (odd, whole))
    assert torch.equal(got, want) and len(handed) == 4
    assert all(x.data_ptr() % 16 == 0 for x in handed)
    assert any(x.row_scale_inv.data_ptr() % 16 for x in odd)


def test_scaled_mm_declines_what_units_cannot_do() -> None:
    from te_dispatch.core.errors import Declined

    a, b = (quantize.quantize(torch.randn(16, 24), CurrentQuantizer(), usage="row") for _ in range(2))
    with pytest.raises(Declined, match="16"):
        gemm.scaled_mm(a, b, layout="NT")
    with pytest.raises(Declined, match="column-wise"):
        gemm.scaled_mm(a, b, layout="TN")


@pytest.mark.parametrize("epilogue", ["gelu", "dgelu", "bgrad_a", "bgrad_b"])
@pytest.mark.parametrize("quantized", [False, True])
def test_epilogues(epilogue: str, quantized: bool) -> None:
    """As the reference; gelu and its derivative amplify the product's error by at most 1.13 and add 16 u32."""
    reference = pytest.importorskip("te_dispatch_reference.gemm")
    layout = "TN" if epilogue.startswith("bgrad") else "NT"
    a, b = _operands(layout, 32, 48, 64, torch.bfloat16)
    size = _exact(a, b, layout)[1] * 1.5
    if quantized:
        a, b = (quantize.quantize(x, CurrentQuantizer(), usage="both") for x in (a, b))
    aux = torch.randn(32, 48).bfloat16() if epilogue == "dgelu" else None
    call: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "aux": aux, "out_dtype": torch.float32}
    run = gemm.emulated if quantized else gemm.matmul
    got, want = run(a, b, **call), reference.gemm(a, b, **call)
    bound = (64 + 24) * 1.2 * U32 * (size + 1)
    assert_within(got.out, want.out, bound + U32 * want.out.double().abs())
    assert (got.aux is None) == (want.aux is None) == (epilogue != "gelu")
    assert (got.dbias is None) == (want.dbias is None) == (epilogue == "gelu")
    if got.aux is not None:
        assert_within(got.aux, want.aux, bound)
    if got.dbias is not None:
        # Sums over up to 64 rows of terms that themselves carry the bound above.
        rows = 64 * bound.max() + 64 * 64 * U32 * size.max() / 8
        assert_within(got.dbias, want.dbias, rows)


def test_gemm_quantizes_from_fp32() -> None:
    """Products of small integers are exact, so that the output cast must equal the reference's bit for bit."""
    reference = pytest.importorskip("te_dispatch_reference.gemm")
    a, b = (torch.randint(-4, 5, (32, 64)).bfloat16() for _ in range(2))
    for q in (CurrentQuantizer(), MXFP8Quantizer("e5m2"), BlockQuantizer()):
        got = gemm.matmul(a, b, layout="NT", out_quantizer=q)
        assert_same_bits(got.out, reference.gemm(a, b, layout="NT", out_quantizer=q).out)


def test_grouped() -> None:
    a, b = torch.randn(40, 16), [torch.randn(24, 16) for _ in range(3)]
    splits = [8, 0, 32]
    each = [gemm.matmul(x, w, layout="NT").out for x, w in zip(a.split(splits), b, strict=True)]
    assert_same_bits(gemm.grouped([a], b, splits, layout="NT"), each)
    assert_same_bits(gemm.grouped_device_splits([a], b, torch.tensor(splits), layout="NT"), each)
    assert_same_bits(gemm.grouped(list(a.split(splits)), b, layout="NT"), each)
    into = [torch.ones(n, 24) for n in splits]
    gemm.grouped([a], b, splits, layout="NT", out=into, accumulate=True)
    for got, want in zip(into, each, strict=True):
        assert_within(got, want.double() + 1, 32 * U32 * (want.double().abs() + 32))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"layout": "TT"}, "layout"),
        ({"epilogue": "tanh"}, "epilogue"),
        ({"accumulate": True}, "accumulate"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"out": torch.ones(3, 3)}, "out"),
        ({"epilogue": "dgelu"}, "aux"),
        ({"layout": "NN"}, "b: got"),
    ],
)
def test_gemm_errors_name_the_argument(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        gemm.matmul(torch.ones(4, 8), torch.ones(6, 8), **{"layout": "NT", **arguments})


def _norm_exact(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, rms: bool, zero: bool) -> torch.Tensor:
    factor = gamma + 1 if zero else gamma
    if rms:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * factor
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * factor
    return y if beta is None else y + beta


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_their_gradients(rms: bool, zero: bool, dtype: torch.dtype) -> None:
    """Moments over n = 96 err by n u32 relative, and pass into y once; gradients chain two such reductions."""
    n, rows = 96, 21
    x, residual = (torch.randn(3, 7, n).to(dtype) for _ in range(2))
    gamma, beta, dy = torch.rand(n).to(dtype) + 0.5, torch.randn(n).to(dtype), torch.randn(3, 7, n).to(dtype)
    options: dict[str, Any] = {"zero_centered_gamma": zero, "residual": residual}
    got = norm.rmsnorm_fwd(x, gamma, **options) if rms else norm.layernorm_fwd(x, gamma, beta, **options)
    total = x + residual
    assert torch.equal(got.residual_out, total)
    x64, g64, b64 = (t.double().requires_grad_() for t in (total, gamma, beta))
    want = _norm_exact(x64, g64, b64, rms, zero)
    assert_within(got.y, want.detach(), (n + 8) * U32 * 16)
    add = torch.randn_like(x)
    want.backward(dy.double())
    if rms:
        grads = norm.rmsnorm_bwd(dy, total, gamma, got.rstd, zero_centered_gamma=zero, add=add)
        assert got.mean is None and grads.dbeta is None
    else:
        grads = norm.layernorm_bwd(dy, total, gamma, got.mean, got.rstd, zero_centered_gamma=zero, add=add)
        assert_within(grads.dbeta, b64.grad, rows * U32 * dy.double().abs().sum((0, 1)))
    # Terms of dx are at most |dy gamma| rstd (1 + |n|), here below 64; dgamma sums `rows` terms below 32.
    assert_within(grads.dx, x64.grad + add.double(), (2 * n + 16) * U32 * 64)
    assert_within(grads.dgamma, g64.grad, (rows + n + 8) * U32 * rows * 32)


def test_norm_casts_the_fp32_result() -> None:
    """Not the rounded y: equal to casting the fp32 norm, different from casting the bf16 one."""
    x, gamma = torch.randn(64, 128).bfloat16(), torch.rand(128).bfloat16()
    q = DelayedQuantizer(scale=torch.tensor([100.0]), amax=torch.zeros(1))
    both = norm.rmsnorm_fwd(x, gamma, quantizer=q, usage="both", with_y=True)
    exact = norm.rmsnorm_fwd(x, gamma, out_dtype=torch.float32).y
    plain = DelayedQuantizer(scale=q.scale)
    assert torch.equal(both.y_quantized.row_data, quantize.quantize(exact, plain, usage="row").row_data)
    assert not torch.equal(both.y_quantized.row_data, quantize.quantize(both.y, plain, usage="row").row_data)
    assert both.y_quantized.dtype == torch.bfloat16 and q.amax.item() == exact.abs().max().item()
    assert norm.rmsnorm_fwd(x, gamma, quantizer=plain).y is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(kind: str, dtype: torch.dtype) -> None:
    """Chains of at most 24 fp32 operations on intermediates below 64 (limit 7 squared, gated)."""
    reference = pytest.importorskip("te_dispatch_reference.activation")
    x = (torch.randn(5, 7, 64) * 3).to(dtype)
    dy = torch.randn(5, 7, 32 if kind in GATED else 64).to(dtype)
    params = (2.0, 1.5) if kind == "clamped_swiglu" else None
    got = activation.activation_fwd(x, kind=kind, params=params)
    want = reference.activation_fwd(x, kind=kind, params=params, out_dtype=torch.float32)
    assert got.out.dtype == dtype
    assert_within(got.out, want.out, 24 * U32 * 64)
    grad = activation.activation_bwd(dy, x, kind=kind, params=params, with_dbias=True)
    want = reference.activation_bwd(dy.float(), x, kind=kind, params=params, with_dbias=True)
    assert_within(grad.dx, want.dx, 24 * U32 * 256)
    assert_within(grad.dbias, want.dbias, 35 * (24 + 35) * U32 * 256)
    if kind in GATED:
        with pytest.raises(ValueError, match="even"):
            activation.activation_fwd(x[..., :63], kind=kind)


def test_activation_of_and_into_codes() -> None:
    x = quantize.quantize(torch.randn(32, 64).bfloat16(), CurrentQuantizer(), usage="row")
    q = MXFP8Quantizer()
    got = activation.activation_fwd(x, kind="swiglu", quantizer=q, usage="both", with_out=True)
    fp32 = activation.activation_fwd(x, kind="swiglu", out_dtype=torch.float32).out
    want = quantize.quantize(fp32, q, usage="both")
    assert torch.equal(got.out_quantized.row_data, want.row_data) and got.out_quantized.dtype == torch.bfloat16
    assert torch.equal(got.out, fp32.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax(dtype: torch.dtype, causal: bool) -> None:
    """exp's argument, below 16, errs by 16 u32; sums of 24 terms; the gradient sums again."""
    x, dy = (torch.randn(2, 3, 17, 24).to(dtype) for _ in range(2))
    mask = torch.rand(2, 1, 17, 24) < 0.3
    mask[:, :, 5] = True
    for given in (None, mask):
        y = softmax.softmax_fwd(x, given, scale=0.7, causal=causal)
        hidden = torch.ones(17, 24, dtype=torch.bool).triu(1) if causal else torch.zeros(17, 24, dtype=torch.bool)
        hidden = hidden if given is None else hidden | given
        z = (x.double() * 0.7).requires_grad_()
        p = torch.softmax(z.masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0.0)
        assert_within(y, p.detach(), (24 + 40) * U32 * p.detach())
        if given is not None:
            assert (y[:, :, 5] == 0).all()
        p.backward(dy.double())
        dx = softmax.softmax_bwd(dy, p.detach().float(), scale=0.7, out_dtype=torch.float32)
        assert_within(dx, z.grad * 0.7, (24 + 40) * U32 * 8)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_rope(layout: str, interleaved: bool) -> None:
    """cos and sin of one fp32 angle err by 1 ulp (2 u32), the sum of two products by 3 more, on values below 8."""
    reference = pytest.importorskip("te_dispatch_reference.position")
    angle = torch.rand(40, 8) * 6
    freqs = (angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)).view(40, 1, 1, 16)
    shapes = {"sbhd": (12, 3, 2, 24), "bshd": (3, 12, 2, 24), "thd": (20, 2, 24)}
    cu = torch.tensor([0, 5, 5, 20], dtype=torch.int32) if layout == "thd" else None
    for offsets in (None, torch.tensor([0, 3, 20], dtype=torch.int32)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shapes[layout]).to(dtype)
            call: dict[str, Any] = {
                "layout": layout, "interleaved": interleaved, "cu_seqlens": cu, "offsets": offsets,
            }  # fmt: skip
            y = position.rope_fwd(x, freqs, **call)
            assert_within(y, reference.rope_fwd(x.float(), freqs, **call), 8 * U32 * 8)
            dx = position.rope_bwd(y.float(), freqs, **call)
            # The rotation is orthogonal, so the backward of the forward is the identity up to y's rounding.
            assert_within(dx.to(dtype), x, 16 * U32 * 8 + 2 * U[dtype] * 8)
            assert_within(dx, reference.rope_bwd(y.float(), freqs, **call), 8 * U32 * 8)
