# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms, activations, softmax and rotary embedding: values and gradients against float64 autograd of the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer
from te_dispatch.ops.activation import GATED, KINDS
from te_dispatch_reference.activation import activation_bwd, activation_fwd
from te_dispatch_reference.norm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from te_dispatch_reference.position import rope_bwd, rope_fwd
from te_dispatch_reference.quantize import dequantize, quantize
from te_dispatch_reference.softmax import softmax_bwd, softmax_fwd

F = torch.nn.functional


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """Within `roundings` float32 roundings (2^-24 each) of the largest magnitude, at which intermediates cancel."""
    assert found.shape == exact.shape
    limit = roundings * 2.0**-24 * float(exact.detach().abs().max()) + 1e-30 if exact.numel() else 0.0
    torch.testing.assert_close(found.double(), exact.detach().double(), rtol=2.0**-24, atol=limit)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_beta", [False, True])
def test_layernorm(zero_centered: bool, with_residual: bool, with_beta: bool) -> None:
    x, residual, dy, add = (randn(3, 4, 32, seed=n) for n in range(4))
    gamma, beta = randn(32), randn(32, seed=2)
    made = layernorm_fwd(
        x, gamma, beta if with_beta else None, zero_centered_gamma=zero_centered,
        residual=residual if with_residual else None,
    )  # fmt: skip
    total = x + residual if with_residual else x
    assert (made.residual_out is None) != with_residual
    assert not with_residual or torch.equal(made.residual_out, total)
    xd, gd, bd = total.double().requires_grad_(), gamma.double().requires_grad_(), beta.double().requires_grad_()
    y = F.layer_norm(xd, (32,), gd + 1 if zero_centered else gd, bd if with_beta else None, 1e-5)
    y.backward(dy.double())
    close(made.y, y)
    close(made.mean, xd.mean(-1))
    close(made.rstd, 1 / (xd.var(-1, correction=0) + 1e-5).sqrt())
    back = layernorm_bwd(dy, total, gamma, made.mean, made.rstd, zero_centered_gamma=zero_centered, add=add)
    # mean and rstd were rounded to float32: each shifts every term of a gradient once.
    close(back.dx, xd.grad + add.double(), 4)
    close(back.dgamma, gd.grad, 4 * 12)  # 12 rows are summed
    close(back.dbeta, dy.double().sum((0, 1)))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm(zero_centered: bool) -> None:
    x, gamma, dy, add = randn(5, 32), randn(32), randn(5, 32, seed=3), randn(5, 32, seed=4)
    made = rmsnorm_fwd(x, gamma, zero_centered_gamma=zero_centered, eps=1e-3)
    xd, gd = x.double().requires_grad_(), gamma.double().requires_grad_()
    y = xd / (xd.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (gd + 1 if zero_centered else gd)
    y.backward(dy.double())
    close(made.y, y)
    assert made.mean is None
    back = rmsnorm_bwd(dy, x, gamma, made.rstd, zero_centered_gamma=zero_centered, add=add)
    close(back.dx, xd.grad + add.double(), 4)
    close(back.dgamma, gd.grad, 4 * 5)
    assert back.dbeta is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norm_casts_the_float32_result_not_the_rounded_one(norm: str) -> None:
    x, gamma = randn(40, 64).bfloat16(), randn(64).bfloat16()
    call: Callable[..., Any] = (
        (lambda **o: layernorm_fwd(x, gamma, None, **o))
        if norm == "layer"
        else (lambda **o: rmsnorm_fwd(x, gamma, **o))
    )
    single = call(out_dtype=torch.float32).y
    for quantizer in (CurrentQuantizer(), MXFP8Quantizer()):
        made = call(quantizer=quantizer, usage="both", with_y=True)
        expected = quantize(single, quantizer, usage="both")
        np.testing.assert_array_equal(made.y_quantized.row_data, expected.row_data)
        np.testing.assert_array_equal(made.y_quantized.col_data, expected.col_data)
        assert made.y_quantized.dtype == torch.bfloat16 and made.y.dtype == torch.bfloat16
        assert call(quantizer=quantizer).y is None
    rounded = quantize(single.bfloat16(), CurrentQuantizer(), usage="row")
    assert (rounded.row_data != quantize(single, CurrentQuantizer(), usage="row").row_data).any()


def test_norm_residual_is_rounded_before_the_norm() -> None:
    x, residual, gamma = randn(6, 32).bfloat16(), randn(6, 32, seed=1).bfloat16(), torch.ones(32)
    made = rmsnorm_fwd(x, gamma, residual=residual)
    assert torch.equal(made.residual_out, (x.float() + residual.float()).bfloat16())
    assert torch.equal(made.y, rmsnorm_fwd(made.residual_out, gamma).y)


def test_norms_of_nothing() -> None:
    made = layernorm_fwd(torch.zeros(0, 8), torch.ones(8), torch.ones(8), quantizer=CurrentQuantizer(), with_y=True)
    assert made.y.shape == (0, 8) and made.mean.shape == (0,) and made.y_quantized.row_data.shape == (0, 8)
    back = layernorm_bwd(torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(8), made.mean, made.rstd)
    assert back.dx.shape == (0, 8) and not back.dgamma.any() and not back.dbeta.any()


def test_norm_errors() -> None:
    x, gamma = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"gamma: got shape \(4,\)"):
        rmsnorm_fwd(x, torch.ones(4))
    with pytest.raises(ValueError, match=r"gamma: got dtype torch\.float16"):
        rmsnorm_fwd(x, gamma.half())
    with pytest.raises(ValueError, match="beta: got shape"):
        layernorm_fwd(x, gamma, torch.ones(4))
    with pytest.raises(ValueError, match=r"x: got dtype torch\.float64"):
        rmsnorm_fwd(x.double(), gamma)
    with pytest.raises(ValueError, match="x: got shape"):
        rmsnorm_fwd(torch.ones(2, 0), torch.ones(0))
    with pytest.raises(ValueError, match=r"residual: got shape \(3, 8\)"):
        rmsnorm_fwd(x, gamma, residual=torch.ones(3, 8))
    with pytest.raises(ValueError, match="residual: got dtype"):
        rmsnorm_fwd(x, gamma, residual=x.half())
    with pytest.raises(ValueError, match=r"out_dtype: got torch\.int8"):
        rmsnorm_fwd(x, gamma, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="usage: got 'rows'"):
        rmsnorm_fwd(x, gamma, quantizer=CurrentQuantizer(), usage="rows")
    rstd = torch.ones(2)
    with pytest.raises(ValueError, match="dy: got shape"):
        rmsnorm_bwd(torch.ones(3, 8), x, gamma, rstd)
    with pytest.raises(ValueError, match="add: got shape"):
        rmsnorm_bwd(x, x, gamma, rstd, add=torch.ones(3, 8))
    with pytest.raises(ValueError, match="rstd: got shape"):
        rmsnorm_bwd(x, x, gamma, torch.ones(3))
    with pytest.raises(ValueError, match="mean: got shape"):
        layernorm_bwd(x, x, gamma, torch.ones(3), rstd)


def formula(x: torch.Tensor, kind: str, limit: float, alpha: float) -> torch.Tensor:
    plain: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": lambda t: F.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": F.relu,
        "srelu": lambda t: F.relu(t) ** 2,
        "silu": F.silu,
    }
    if kind in plain:
        return plain[kind](x)
    u, v = x.chunk(2, -1)
    if kind == "clamped_swiglu":
        capped = u.clamp(max=limit)
        return capped * torch.sigmoid(alpha * capped) * (v.clamp(-limit, limit) + 1)
    gate = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
    return (torch.sigmoid(u) if kind == "glu" else plain[gate[kind]](u)) * v


@pytest.mark.parametrize(
    ("kind", "cut_off"), [("relu", 0.0), ("reglu", 0.0), ("srelu", math.nan), ("sreglu", math.nan)]
)
def test_relu_selects_and_its_square_multiplies(kind: str, cut_off: float) -> None:
    """At x <= 0, with a gradient that is not finite (docs/numerics.md)."""
    x = torch.tensor([[-1.0, 0.0, 3.0, 5.0] if kind in GATED else [-1.0, 0.0]])
    for value in (math.nan, math.inf):
        dx = activation_bwd(torch.full((1, 2), value), x, kind=kind, with_dx=True).dx
        torch.testing.assert_close(dx[:, :2], torch.full((1, 2), cut_off), equal_nan=True)


@pytest.mark.parametrize("params", [None, (1.0, 2.5)], ids=["default", "params"])
@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str, params: tuple[float, float] | None) -> None:
    if params is not None and kind != "clamped_swiglu":
        with pytest.raises(ValueError, match=f"params: given for {kind}"):
            activation_fwd(randn(2, 4), kind=kind, params=params)
        return
    x = torch.cat([randn(30, 16) * 4, torch.linspace(-900, 900, 16)[None]])
    x = x[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))].reshape(31, 1, 16)
    xd = x.double().requires_grad_()
    y = formula(xd, kind, *(params or (7.0, 1.702)))
    dy = randn(*y.shape, seed=5)
    y.backward(dy.double())
    # PyTorch's float64 tanh form cancels near -1: an error of 2^-53 times factors below 100.
    tail = 2.0**-46
    found = activation_fwd(x, kind=kind, params=params).out.double()
    torch.testing.assert_close(found, y.detach(), rtol=2.0**-23, atol=tail)
    back = activation_bwd(dy, x, kind=kind, params=params, with_dbias=True)
    torch.testing.assert_close(back.dx.double(), xd.grad, rtol=2.0**-23, atol=tail)
    close(back.dbias, xd.grad.reshape(-1, 16).sum(0), 2)


def test_a_record_s_values_are_rounded_before_they_meet_a_limit() -> None:
    """0.375 times RN32(4 / 3) is 0.5000000149 exactly and 0.5 in fp32, which the limit of 0.5 does not cut off."""
    quantizer = DelayedQuantizer("e4m3fn", scale=torch.tensor([0.75]))
    x = quantize(torch.tensor([[1.0, 0.5]]), quantizer, usage="row")
    assert dequantize(x).tolist()[0][1] == 0.5
    made = activation_bwd(torch.tensor([[1.0]]), x, kind="clamped_swiglu", params=(0.5, 1.702))
    assert made.dx[0, 1] == 0.5 * torch.sigmoid(torch.tensor(0.851))
    assert activation_bwd(torch.tensor([[torch.nan]]), x, kind="clamped_swiglu", params=(0.5, 1.702)).dx[0, 1].isnan()


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "clamped_swiglu"])
def test_activation_casts_the_float32_result(kind: str) -> None:
    x = randn(40, 64).bfloat16()
    dy = randn(40, 32 if kind in GATED else 64, seed=1).bfloat16()
    for quantizer in (CurrentQuantizer("e5m2"), MXFP8Quantizer()):
        made = activation_fwd(x, kind=kind, quantizer=quantizer, usage="both", with_out=True)
        expected = quantize(activation_fwd(x, kind=kind, out_dtype=torch.float32).out, quantizer, usage="both")
        np.testing.assert_array_equal(made.out_quantized.row_data, expected.row_data)
        np.testing.assert_array_equal(made.out_quantized.col_data, expected.col_data)
        assert torch.equal(made.out, activation_fwd(x, kind=kind).out)
        back = activation_bwd(dy, x, kind=kind, quantizer=quantizer, with_dbias=True)
        single = activation_bwd(dy.float(), x, kind=kind, with_dbias=True)
        expected = quantize(single.dx, quantizer, usage="row")
        np.testing.assert_array_equal(back.dx_quantized.row_data, expected.row_data)
        assert back.dx is None and back.dbias.dtype == torch.bfloat16
        close(back.dbias.float(), single.dbias.bfloat16().float())


def test_activation_of_a_quantized_input_reads_its_values() -> None:
    x = quantize(randn(6, 32), CurrentQuantizer(), usage="row")
    close(activation_fwd(x, kind="silu").out, F.silu(dequantize(x).double()), 2)


def test_activation_errors_and_empty() -> None:
    assert activation_fwd(torch.zeros(0, 8), kind="swiglu", quantizer=CurrentQuantizer(), with_out=True).out.shape == (
        0,
        4,
    )
    assert not activation_bwd(torch.zeros(0, 4), torch.zeros(0, 8), kind="glu", with_dbias=True).dbias.any()
    with pytest.raises(ValueError, match=r"kind: got 'mish', expected one of gelu, .*clamped_swiglu"):
        activation_fwd(torch.ones(2, 4), kind="mish")
    with pytest.raises(ValueError, match="x: got a last dimension of 5"):
        activation_fwd(torch.ones(2, 5), kind="geglu")
    with pytest.raises(ValueError, match="x: got a tensor without dimensions"):
        activation_fwd(torch.ones(()), kind="gelu")
    with pytest.raises(ValueError, match="x: got dtype"):
        activation_fwd(torch.ones(2, 4, dtype=torch.int32), kind="gelu")
    with pytest.raises(ValueError, match="out_dtype: got"):
        activation_fwd(torch.ones(2, 4), kind="gelu", out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dy: got shape \(2, 4\), expected \(2, 2\)"):
        activation_bwd(torch.ones(2, 4), torch.ones(2, 4), kind="glu")
    with pytest.raises(ValueError, match="usage: got"):
        activation_bwd(torch.ones(2, 4), torch.ones(2, 4), kind="gelu", usage="diagonal")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax(causal: bool, masked: bool) -> None:
    x, dy = randn(2, 3, 5, 7), randn(2, 3, 5, 7, seed=1)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
        mask[0, 0, 2] = True
    hidden = torch.zeros(2, 3, 5, 7, dtype=torch.bool)
    for i in range(5):
        for j in range(7):
            hidden[..., i, j] = causal and j > i
    hidden = hidden | mask if masked else hidden
    xd = x.double().requires_grad_()
    y = torch.softmax((0.7 * xd).masked_fill(hidden, -1e30), -1).masked_fill(hidden, 0)
    y.backward(dy.double())
    made = softmax_fwd(x, mask, scale=0.7, causal=causal)
    close(made, y)
    assert not masked or not made[0, :, 2].any()
    close(softmax_bwd(dy, made, scale=0.7), xd.grad, 8)  # y was rounded, and 7 products of it are summed


def test_softmax_errors_and_empty() -> None:
    assert softmax_fwd(torch.zeros(2, 3, 0)).shape == (2, 3, 0)
    assert softmax_fwd(torch.full((1, 2), -math.inf)).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match=r"mask: got dtype torch\.uint8"):
        softmax_fwd(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"mask: got shape \(4, 3\)"):
        softmax_fwd(torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="x: got shape"):
        softmax_fwd(torch.ones(3))
    with pytest.raises(ValueError, match="dy: got shape"):
        softmax_bwd(torch.ones(3, 3), torch.ones(2, 3))


def rope_formula(x: torch.Tensor, positions: list[list[int]], freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """bshd, one feature pair at a time, as complex rotation."""
    out = x.clone()
    r = freqs.shape[-1]
    for b, row in enumerate(positions):
        for s, position in enumerate(row):
            for p in range(r // 2):
                i, j = (2 * p, 2 * p + 1) if interleaved else (p, p + r // 2)
                pair = torch.complex(x[b, s, :, i], x[b, s, :, j])
                turned = pair * torch.exp(1j * freqs[position, 0, 0, i].double())
                out[b, s, :, i], out[b, s, :, j] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_rope(layout: str, interleaved: bool, with_offsets: bool) -> None:
    half = torch.outer(torch.arange(12.0), 10 ** -torch.arange(0, 1, 0.25))
    freqs = torch.stack([half, half], -1).flatten(1) if interleaved else torch.cat([half, half], -1)
    freqs = freqs[:, None, None]
    x, dy = randn(2, 5, 3, 10), randn(2, 5, 3, 10, seed=1)
    offsets = [3, 6] if with_offsets else [0, 0]
    xd = x.double().requires_grad_()
    y = rope_formula(xd, [[o + s for s in range(5)] for o in offsets], freqs, interleaved)
    y.backward(dy.double())
    given: dict[str, Any] = {"layout": layout, "interleaved": interleaved}
    given["offsets"] = torch.tensor(offsets, dtype=torch.int32) if with_offsets else None
    arrange: Callable[[torch.Tensor], torch.Tensor] = {
        "bshd": lambda t: t,
        "sbhd": lambda t: t.transpose(0, 1),
        "thd": lambda t: torch.cat([t.flatten(0, 1), torch.ones(2, 3, 10, dtype=t.dtype)]),  # two tokens of no sequence
    }[layout]
    if layout == "thd":
        given["cu_seqlens"] = torch.tensor([0, 5, 10], dtype=torch.int32)
    close(rope_fwd(arrange(x), freqs, **given), arrange(y.detach()))
    close(rope_bwd(arrange(dy), freqs, **given), arrange(xd.grad))


def test_rope_errors_and_empty() -> None:
    x, freqs = torch.ones(4, 2, 3, 8), torch.ones(4, 1, 1, 6)
    assert rope_fwd(torch.zeros(0, 2, 3, 8), freqs).shape == (0, 2, 3, 8)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    wrong: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("layout: got 'bhsd'", x, freqs, {"layout": "bhsd"}),
        ("x: got shape", x[0], freqs, {}),
        ("x: got dtype", x.int(), freqs, {}),
        ("freqs: got dtype", x, freqs.double(), {}),
        (r"freqs: got shape \(4, 1, 1, 9\)", x, torch.ones(4, 1, 1, 9), {}),
        ("freqs: got 3 positions, expected positions 0 to 3", x, freqs[:3], {}),
        ("freqs: got 4 positions, expected positions 1 to 4", x, freqs, {"offsets": torch.tensor([0, 1]).int()}),
        ("offsets: got shape", x, freqs, {"offsets": torch.tensor([0]).int()}),
        ("cu_seqlens: not given", x[:, 0], freqs, {"layout": "thd"}),
        ("cu_seqlens: given for layout sbhd", x, freqs, {"cu_seqlens": cu}),
        (
            r"cu_seqlens: got \[0, 2, 4\], expected to rise from 0 to at most 3",
            x[:3, 0],
            freqs,
            {"layout": "thd", "cu_seqlens": cu},
        ),
    ]
    for message, tensor, angles, options in wrong:
        with pytest.raises(ValueError, match=message):
            rope_fwd(tensor, angles, **options)
    with pytest.raises(ValueError, match="dy: got shape"):
        rope_bwd(x[0], freqs)
