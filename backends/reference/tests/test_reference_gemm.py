# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""GEMM: gradients, quantized operands, epilogues, groups, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch_reference import host
from te_dispatch_reference.gemm import gemm, grouped_gemm
from te_dispatch_reference.quantize import dequantize, quantize

F = torch.nn.functional


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def equal_but_for_one_rounding(found: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is float64; the result is its rounding. float64 sums in another order can move a value across a rounding
    boundary, so allow one unit in the last place, and where terms cancel the float64 error itself.
    """
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=unit, atol=1e-13 * float(exact.abs().max() + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fprop_dgrad_wgrad_are_the_gradients_of_a_linear(dtype: torch.dtype) -> None:
    x, w, dy = randn(3, 5, 24, dtype=dtype), randn(16, 24, dtype=dtype), randn(3, 5, 16, dtype=dtype)
    xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
    y = F.linear(xd, wd)
    y.backward(dy.double())
    equal_but_for_one_rounding(gemm(x, w, layout="NT").out, y.detach())
    equal_but_for_one_rounding(gemm(dy, w, layout="NN").out, xd.grad)
    equal_but_for_one_rounding(gemm(dy, x, layout="TN").out, wd.grad)


def test_the_output_is_rounded_once() -> None:
    # 1 + 2^-8 + 2^-30 lies just above a bfloat16 tie; through float32 it would fall onto the tie and go down.
    a = torch.tensor([[1.0, 2.0**-8, 2.0**-30]])
    assert gemm(a, torch.ones(1, 3), layout="NT", out_dtype=torch.bfloat16).out.item() == 1 + 2.0**-7


@pytest.mark.parametrize("seed", range(3))
def test_rounding_to_bfloat16_and_float16_is_nearest_even(seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = np.ldexp(generator.uniform(-1, 1, 20_000), generator.integers(-140, 128, 20_000))
    values = np.concatenate([values, [np.inf, -np.inf, 0.0, -0.0, 1e300, -1e-300, 3.4e38]])
    grid = np.arange(2**16, dtype=np.uint16)
    for dtype, every in (
        (torch.bfloat16, torch.from_numpy(grid.view(np.int16)).view(torch.bfloat16).double().numpy()),
        (torch.float16, torch.from_numpy(grid.view(np.int16)).view(torch.float16).double().numpy()),
    ):
        finite = np.unique(every[np.isfinite(every)])
        found = host.rounded(values, dtype).double().numpy()
        inside = np.abs(values) <= finite.max()
        above = np.searchsorted(finite, values[inside]).clip(0, finite.size - 1)
        nearest = np.minimum(np.abs(finite[above] - values[inside]), np.abs(finite[above - 1] - values[inside]))
        np.testing.assert_array_equal(np.abs(found[inside] - values[inside]), nearest)
        huge = np.abs(values) >= 2 * finite.max()
        np.testing.assert_array_equal(found[huge], np.sign(values[huge]) * np.inf)


QUANTIZERS = [
    CurrentQuantizer(),
    CurrentQuantizer("e5m2fnuz"),
    BlockQuantizer(power_of_two=False),
    BlockQuantizer(two_d=True, power_of_two=False),
    MXFP8Quantizer(),
]


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.scaling}-{q.encoding}")
def test_quantized_operands_stand_for_their_values(quantizer: Quantizer, layout: str) -> None:
    a = randn(150, 140) if layout != "TN" else randn(140, 150)
    b = randn(33, 140) if layout == "NT" else randn(140, 33)
    used = {"NT": ("row", "row"), "NN": ("row", "column"), "TN": ("column", "column")}[layout]
    operands = [quantize(x, quantizer, usage=u) for x, u in zip((a, b), used)]
    # fp32 values of one element each: the product of code (4 bits) and scale (24 bits) in float64 is exact, in fp32
    # it is rounded once, so sums may differ by 2^-24 of the sum of magnitudes from either operand.
    left, right = (dequantize(x, dtype=torch.float32).double() for x in operands)
    if layout == "TN":
        left = left.T
    if layout == "NT":
        right = right.T
    found = gemm(*operands, layout=layout).out.double()
    assert ((found - left @ right).abs() <= 4 * 2.0**-24 * (left.abs() @ right.abs())).all()
    both = [quantize(x, quantizer, usage="both") for x in (a, b)]
    np.testing.assert_array_equal(gemm(*both, layout=layout).out, gemm(*operands, layout=layout).out)


def test_mixed_formats_of_one_flavour_multiply_and_flavours_do_not_mix() -> None:
    a, b = randn(4, 32), randn(6, 32)
    mixed = gemm(
        quantize(a, CurrentQuantizer("e5m2"), usage="row"), quantize(b, CurrentQuantizer(), usage="row"), layout="NT"
    )
    assert mixed.out.shape == (4, 6)
    with pytest.raises(ValueError, match="b: got encoding e4m3fnuz"):
        gemm(
            quantize(a, CurrentQuantizer(), usage="row"),
            quantize(b, CurrentQuantizer("e4m3fnuz"), usage="row"),
            layout="NT",
        )


def gelu(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


def test_alpha_bias_gelu_accumulate_in_that_order() -> None:
    a, b, bias = randn(5, 8), randn(6, 8), randn(6)
    z = 0.5 * a.double() @ b.double().T + bias.double()
    out = randn(5, 6)
    expected = out.double() + gelu(z)
    made = gemm(a, b, layout="NT", alpha=0.5, bias=bias, epilogue="gelu", out=out, accumulate=True)
    assert made.out is out and made.dbias is None
    equal_but_for_one_rounding(out, expected)
    equal_but_for_one_rounding(made.aux, z)


def test_dgelu_is_the_gradient_through_gelu() -> None:
    z, dy, w = randn(2, 5, 6), randn(2, 5, 8), randn(8, 6)
    zd = z.double().requires_grad_()
    F.linear(gelu(zd), w.double()).backward(dy.double())
    made = gemm(dy, w, layout="NN", epilogue="dgelu", aux=z)
    equal_but_for_one_rounding(made.out, zd.grad)
    equal_but_for_one_rounding(made.dbias, zd.grad.reshape(-1, 6).sum(0))


@pytest.mark.parametrize("which", ["bgrad_a", "bgrad_b"])
def test_bias_gradients(which: str) -> None:
    a, b = randn(7, 4), randn(7, 5)
    made = gemm(a, b, layout="TN", epilogue=which)
    equal_but_for_one_rounding(made.dbias, (a if which == "bgrad_a" else b).double().sum(0))


@pytest.mark.parametrize("make", [CurrentQuantizer, MXFP8Quantizer, BlockQuantizer, NVFP4Quantizer])
def test_quantized_outputs_cast_the_float32_result(make: Callable[[], Quantizer]) -> None:
    a, b = randn(40, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16)
    single = gemm(a, b, layout="NT", out_dtype=torch.float32, epilogue="gelu")
    made = gemm(a, b, layout="NT", epilogue="gelu", out_quantizer=make(), aux_quantizer=make())
    for found, high in ((made.out, single.out), (made.aux, single.aux)):
        expected = quantize(high, make(), usage="row")
        assert found.dtype == torch.bfloat16
        np.testing.assert_array_equal(found.row_data, expected.row_data)
        np.testing.assert_array_equal(found.row_scale_inv, expected.row_scale_inv)


def test_output_casts_record_their_amax() -> None:
    a, b = randn(4, 8), randn(4, 8)
    amax = torch.zeros(1)
    gemm(a, b, layout="NT", out_quantizer=DelayedQuantizer(scale=torch.ones(1), amax=amax))
    assert amax.item() == gemm(a, b, layout="NT").out.abs().max().item()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_empty(m: int, n: int, k: int, layout: str) -> None:
    a = torch.ones((k, m) if layout[0] == "T" else (m, k))
    b = torch.ones((n, k) if layout[1] == "T" else (k, n))
    out = torch.full((m, n), 2.0)
    assert torch.equal(gemm(a, b, layout=layout, out=out, accumulate=True).out, torch.full((m, n), 2.0 + k))


@pytest.mark.parametrize("splits", [[2, 0, 5], (2, 0, 5), torch.tensor([2, 0, 5])], ids=["list", "tuple", "tensor"])
def test_groups_by_splits_equal_single_products(splits: Any) -> None:
    x, ws, biases = randn(7, 8), [randn(6, 8), randn(3, 8), randn(4, 8)], [randn(6), randn(3), randn(4)]
    parts = x.split([2, 0, 5])
    expected = [gemm(p, w, layout="NT", bias=c).out for p, w, c in zip(parts, ws, biases)]
    for found in (
        grouped_gemm([x], ws, splits, layout="NT", bias=biases),
        grouped_gemm(parts, ws, layout="NT", bias=biases),
    ):
        assert all(torch.equal(f, e) for f, e in zip(found, expected))
    quantized = [quantize(w, CurrentQuantizer(), usage="row") for w in ws]
    whole = quantize(x, CurrentQuantizer(), usage="row")
    values = dequantize(whole)
    made = grouped_gemm([whole], quantized, splits, layout="NT")
    for part, w, found in zip(values.split([2, 0, 5]), quantized, made):
        torch.testing.assert_close(found, part @ dequantize(w).T, rtol=0, atol=64 * 2.0**-24 * 20)


def test_grouped_wgrad_accumulates() -> None:
    dys, xs = [randn(4, 6), torch.zeros(0, 6)], [randn(4, 8), torch.zeros(0, 8)]
    outs = [torch.ones(6, 8), torch.ones(6, 8)]
    made = grouped_gemm(dys, xs, layout="TN", out=outs, accumulate=True)
    assert made[0] is outs[0] and torch.equal(outs[1], torch.ones(6, 8))
    equal_but_for_one_rounding(outs[0], 1 + dys[0].double().T @ xs[0].double())


A, B = torch.ones(4, 8), torch.ones(6, 8)
ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("layout: got 'TT'", {"layout": "TT"}),
    ("a: got dtype torch.int64", {"a": torch.ones(4, 8, dtype=torch.int64)}),
    ("a: got str 'x', expected a torch.Tensor", {"a": "x"}),
    (r"a: got shape \(8,\)", {"a": torch.ones(8)}),
    ("b: got dtype torch.bfloat16", {"b": B.bfloat16()}),
    ("b: got a Quantized .* expected both operands quantized", {"b": quantize(B, CurrentQuantizer(), usage="row")}),
    (r"b: got \(6, 7\)", {"b": torch.ones(6, 7)}),
    ("accumulate: given without out", {"accumulate": True}),
    (r"out: got shape \(4, 5\)", {"out": torch.ones(4, 5)}),
    ("out: got dtype torch.int32", {"out": torch.ones(4, 6, dtype=torch.int32)}),
    ("out_dtype: got torch.int8", {"out_dtype": torch.int8}),
    ("out_dtype: got torch.float16, expected out's", {"out": torch.ones(4, 6), "out_dtype": torch.float16}),
    (r"bias: got shape \(4,\)", {"bias": torch.ones(4)}),
    ("epilogue: got 'relu'", {"epilogue": "relu"}),
    ("aux: not given with epilogue dgelu", {"epilogue": "dgelu"}),
    ("aux: given with epilogue gelu", {"epilogue": "gelu", "aux": torch.ones(4, 6)}),
    (r"aux: got shape \(4, 5\)", {"epilogue": "dgelu", "aux": torch.ones(4, 5)}),
    ("aux_quantizer: given with epilogue None", {"aux_quantizer": CurrentQuantizer()}),
    ("out_quantizer: given with out", {"out": torch.ones(4, 6), "out_quantizer": CurrentQuantizer()}),
]


@pytest.mark.parametrize(("message", "wrong"), ERRORS, ids=[e[0] for e in ERRORS])
def test_errors_name_the_argument(message: str, wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"a": A, "b": B, "layout": "NT", **wrong}
    out = arguments.get("out")
    before = None if out is None else out.clone()
    with pytest.raises((TypeError, ValueError), match=message):
        gemm(**arguments)
    assert out is None or torch.equal(out, before)


def test_grouped_errors_name_the_argument_before_anything_is_written() -> None:
    out = [torch.zeros(4, 6), torch.zeros(4, 5)]
    with pytest.raises(ValueError, match="out: got shape"):
        grouped_gemm([A, A], [B, B], layout="NT", out=out)
    assert not out[0].any()
    with pytest.raises(ValueError, match="b: got 1, expected 2"):
        grouped_gemm([A, A], [B], layout="NT")
    with pytest.raises(ValueError, match="bias: got 1, expected 2"):
        grouped_gemm([A, A], [B, B], layout="NT", bias=[torch.ones(6)])
    with pytest.raises(ValueError, match=r"splits: got \[1, 1\]"):
        grouped_gemm([A], [B, B], [1, 1], layout="NT")
    with pytest.raises(ValueError, match="a: got 2 tensors with splits"):
        grouped_gemm([A, A], [B, B], [4, 4], layout="NT")
    with pytest.raises(ValueError, match="a: got one tensor with block_1d"):
        blocks = quantize(A, BlockQuantizer(), usage="row")
        grouped_gemm([blocks], [blocks], [4], layout="NT")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("epilogue", ["gelu", "dgelu", "bgrad_a", "bgrad_b"])
def test_special_values_warn_nobody(epilogue):
    """NumPy warns of NaN and Inf that come up; here they are results."""
    a, b = torch.randn(4, 8), torch.randn(6, 8)
    a[0, 0], a[1, 1], b[0, 0], b[1] = torch.inf, -torch.inf, torch.nan, 0.0
    aux = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1.0]).expand(4, 6)
    found = gemm(a, b, layout="NT", epilogue=epilogue, aux=aux if epilogue == "dgelu" else None)
    assert found.out.isnan().any()
