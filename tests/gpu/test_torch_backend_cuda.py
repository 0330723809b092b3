# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The torch backend on a GPU against the reference: casts by bits, the rest within the bound of its arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

pytestmark = pytest.mark.usefixtures("torch_first")

DEVICE = torch.device("cuda")


def chosen(operator: str) -> set[str]:
    dispatcher = scopes.MANAGER.bindings.dispatchers[operator]
    return {entry.chosen.id for entry in dispatcher.entries.values()}


def all_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)


def random_fp32_patterns() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randint(-(2**31), 2**31, (2048, 512), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


QUANTIZERS = [
    *(pytest.param(lambda e=e: CurrentQuantizer(e), id=f"current-{e}") for e in FP8_ENCODINGS),
    *(pytest.param(lambda e=e: CurrentQuantizer(e, common=True), id=f"common-{e}") for e in FP8_ENCODINGS),
    pytest.param(lambda: BlockQuantizer(), id="block-1d"),
    pytest.param(lambda: BlockQuantizer(two_d=True, power_of_two=False), id="block-2d"),
    pytest.param(lambda: MXFP8Quantizer(), id="mxfp8"),
    pytest.param(lambda: NVFP4Quantizer(), id="nvfp4"),
]


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("source", [all_bf16, random_fp32_patterns])
def test_every_cast_equals_the_references_by_bits(make, source):
    x = source()
    # Scales of whole tensors with Inf are 1; finite data makes them interesting.
    for data in (x, torch.where(x.float().abs() < 1e30, x, torch.zeros_like(x))):
        got = ops.quantize(data.to(DEVICE), make(), usage="both")
        with te_dispatch.using(quantize="reference"):
            want = ops.quantize(data, make(), usage="both")
        for name in ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None), name
            if a is not None:
                assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)), name
    assert "torch.quantize" in chosen("quantize")


def test_delayed_cast_and_update_equal_the_references_by_bits():
    torch.manual_seed(0)
    x = torch.randn(256, 512, dtype=torch.bfloat16) * 7
    states = {}
    for name, device in (("torch", DEVICE), ("reference", torch.device("cpu"))):
        history, scale = torch.zeros(4, 2, device=device), torch.full((2,), 3.0, device=device)
        with te_dispatch.using(quantize=name):
            for step in range(5):
                q = DelayedQuantizer(scale=scale[0:1], amax=history[0, 0:1])
                out = ops.quantize(x.to(device) * (step + 1), q, usage="both")
                ops.update_delayed_scales([history], [scale], [[448.0, 448.0]])
        states[name] = (history.cpu(), scale.cpu(), out.row_data.cpu(), out.col_data.cpu())
    for a, b in zip(states["torch"], states["reference"]):
        assert torch.equal(a, b)


def fp8_bound(a: torch.Tensor, b: torch.Tensor, k: int, split: bool, out_eps: float, out: torch.Tensor) -> torch.Tensor:
    """|error| per element of an FP8 product.

    Products of FP8 values are exact in fp32. Hopper's units keep 14 bits of a sum (2^-13 relative per partial sum in
    fast mode, promoted to fp32 every 128 elements in split mode); both are relative to the running sum, which sum
    |a||b| bounds. Then one rounding to the output's dtype.
    """
    magnitude = a.abs() @ b.abs().T
    steps = 128 / 32 if split else k / 32
    return magnitude * 2**-13 * steps + out.abs() * out_eps


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_fp8_gemm_uses_the_matrix_units_and_stays_within_their_bound(layout, split):
    torch.manual_seed(1)
    m, n, k = 256, 128, 512
    shapes = {"NT": ((m, k), (n, k)), "NN": ((m, k), (k, n)), "TN": ((k, m), (k, n))}[layout]
    a = ops.quantize(torch.randn(shapes[0], device=DEVICE, dtype=torch.bfloat16), CurrentQuantizer(), usage="both")
    b = ops.quantize(torch.randn(shapes[1], device=DEVICE, dtype=torch.bfloat16), CurrentQuantizer(), usage="both")
    out = ops.gemm(a, b, layout=layout, split_accumulator=split).out
    av, bv = (ops.dequantize(t, dtype=torch.float32).double() for t in (a, b))
    left = av.T if layout == "TN" else av
    right = bv if layout == "NT" else bv.T
    want = left @ right.T
    bound = fp8_bound(left, right, k, split, 2**-8, want)
    assert ((out.double() - want).abs() <= bound).all()
    assert "torch.scaled_mm" in chosen("gemm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(129, 127, 129), (3, 5, 1031), (64, 256, 512)])
def test_a_product_is_rounded_once_after_the_bias_is_added(sizes, dtype):
    m, n, k = sizes
    a = (torch.rand(m, k, device=DEVICE) + 0.5).to(dtype)
    b = (torch.rand(n, k, device=DEVICE) + 0.5).to(dtype)
    # Halving the sum moves it to another power of two: a product rounded before has an error of a whole last place.
    bias = (-0.5 * (a.float() @ b.float().t()).mean(0)).to(dtype)
    out = ops.gemm(a, b, layout="NT", bias=bias).out
    expected = a.double() @ b.double().t() + bias.double()
    last_place = torch.finfo(dtype).eps * torch.exp2(expected.abs().log2().floor())
    assert "torch.matmul" in chosen("gemm")
    assert ((out.double() - expected).abs() / last_place).max().item() <= 0.55


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_attention_forward_and_backward(mask, groups, layout):
    torch.manual_seed(2)
    b, h, s, d = 2, 4, 128, 64

    def make(heads: int) -> torch.Tensor:
        shape = (s, b, heads, d) if layout == "sbhd" else (b, s, heads, d)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    q, k, v, dout = make(h), make(groups), make(groups), make(h)
    forward = ops.attention_fwd(q, k, v, layout=layout, mask=mask)
    grads = ops.attention_bwd(dout, q, k, v, forward.out, forward.lse, forward.saved, layout=layout, mask=mask)

    def oracle(dtype: torch.dtype) -> list[torch.Tensor]:
        order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        back = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        qh, kh, vh = (t.permute(order) for t in leaves)
        kh, vh = (t.repeat_interleave(h // groups, 1) for t in (kh, vh))
        z = qh @ kh.transpose(-1, -2) / math.sqrt(d)
        if mask == "causal":
            z = z.masked_fill(torch.ones(s, s, dtype=torch.bool, device=DEVICE).triu(1), -math.inf)
        out = (z.softmax(-1) @ vh).permute(back)
        out.backward(dout.to(dtype))
        return [out.detach(), *(t.grad for t in leaves), torch.logsumexp(z, -1).detach()]

    exact, rough = oracle(torch.float64), oracle(torch.bfloat16)
    got = [forward.out, grads.dq, grads.dk, grads.dv]
    for name, a, e, r in zip(("out", "dq", "dk", "dv"), got, exact, rough):
        # Twice PyTorch's own error in this dtype, or 2 ulp at the row's largest magnitude.
        ulp = e.abs().amax(-1, keepdim=True) * 2**-8
        assert ((a.double() - e).abs() <= torch.maximum(2 * (r.double() - e).abs().max(), 2 * ulp)).all(), name
    assert (forward.lse.double() - exact[4]).abs().max() < 2**-8 * exact[4].abs().max()
    assert forward.saved.implementation.startswith("torch.sdpa_"), forward.saved.implementation


def test_cpu_and_gpu_calls_alternate():
    x = torch.randn(64, 64)
    for _ in range(3):
        for data in (x, x.to(DEVICE)):
            assert ops.quantize(data, CurrentQuantizer(), usage="row").row_data.device == data.device
    meta = ops.quantize(x.to("meta"), CurrentQuantizer(), usage="row")
    assert meta.row_data.device.type == "meta"


def test_capture_needs_a_warm_call_and_replays_with_new_inputs():
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with te_dispatch.using(quantize=["torch"]):  # a scope of its own: nothing is resolved in it yet
        with (
            pytest.raises(te_dispatch.CaptureError, match="run the step once"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            ops.quantize(x, CurrentQuantizer(), usage="both")
        ops.quantize(x, CurrentQuantizer(), usage="both")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = ops.quantize(x, CurrentQuantizer(), usage="both")
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        torch.cuda.synchronize()
        fresh = ops.quantize(x, CurrentQuantizer(), usage="both")
    assert torch.equal(captured.row_data, fresh.row_data)
    assert torch.equal(captured.row_scale_inv, fresh.row_scale_inv)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_cudnn_s_gradients_do_not_depend_on_how_an_earlier_dout_lay(layout):
    """PyTorch keeps cuDNN's graph of a call for all whose q, k and v have the same strides, and the strides of dout
    with it."""
    torch.manual_seed(0)
    shape = (48, 2, 4, 64) if layout == "sbhd" else (2, 48, 4, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    dout = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    with te_dispatch.using(attention_fwd="torch.sdpa_cudnn", attention_bwd="torch.sdpa_cudnn_bwd"):
        made = ops.attention_fwd(q, k, v, layout=layout, mask="none")

        def gradients(dout):
            found = ops.attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, layout=layout, mask="none")
            return found.dq, found.dk, found.dv

        wide = torch.zeros(*shape[:-1], 128, device=DEVICE, dtype=torch.bfloat16)[..., :64].copy_(dout)
        turned = dout.transpose(0, 2).contiguous().transpose(0, 2)
        first = gradients(dout)
        for other in (wide, turned, dout):
            for one, again in zip(first, gradients(other)):
                torch.testing.assert_close(again, one, rtol=2e-2, atol=2e-2)
