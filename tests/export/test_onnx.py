# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Models for ONNX, run by onnxruntime on the CPU, against eager.

An export costs seconds, so the modules of a test are the parts of one model: all take the same input, and each gives an
output of its own.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_dispatch.pytorch.export import onnx_export, te_translation_table
from tests.compile.training import Attention, autocast

pytestmark = pytest.mark.slow

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EPS = 2.0**-24


class Parts(torch.nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.parts = torch.nn.ModuleDict(parts)

    def forward(self, x):
        return tuple(out for part in self.parts.values() for out in _flat(part(x)))


def _flat(out):
    return out if isinstance(out, tuple) else (out,)


class Quantized(torch.nn.Module):
    """A cast of the input in every FP8 dtype."""

    def forward(self, x):
        scale = torch.tensor(0.3)
        ops = torch.ops.te_dispatch
        codes = {encoding: ops.quantize_linear(x, scale, encoding) for encoding in ENCODINGS}
        return tuple(ops.dequantize_linear(q, scale, encoding) for encoding, q in codes.items())


ENCODINGS = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")


def x_of(batch, seed=0):
    return torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(seed))


def translated(module, x, recipe=None, **options):
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), autocast(recipe), onnx_export(enabled=True):
        return torch.onnx.export(
            module, (x,), dynamo=True, custom_translation_table=te_translation_table, verbose=False, **options
        )


def session(program):
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])


def run(running, x):
    return [torch.from_numpy(out) for out in running.run(None, {running.get_inputs()[0].name: x.numpy()})]


def eager(module, x, recipe=None):
    with torch.no_grad(), autocast(recipe):
        return _flat(module(x))


def dynamic_batch():
    return {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=64)},)}


def standard(program):
    """Only operators of ONNX itself, in an opset that has FP8, and no functions."""
    graph = program.model.graph
    assert {node.domain for node in graph} == {""} and not program.model.functions
    assert program.model.opset_imports[""] >= 19 and set(program.model.opset_imports) == {""}
    return [node.op_type for node in graph]


def initialized(module):
    """Parameters other than constant ones and zeros, which the optimizer may merge."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.eval()


def mlp(activation="gelu", **options):
    return te.LayerNormMLP(32, 64, activation=activation, **options)


def test_every_module_in_high_precision():
    module = initialized(
        Parts(
            linear=te.Linear(32, 64, bias=False),
            split=te.Linear(32, 64, parameters_split=("a", "b"), return_bias=True),
            layernorm=te.LayerNorm(32, zero_centered_gamma=True),
            rmsnorm=te.RMSNorm(32),
            layernorm_linear=te.LayerNormLinear(32, 64, return_layernorm_output=True),
            attention=Attention(),
            multihead=te.MultiheadAttention(32, 2, attention_dropout=0.0, input_layernorm=True, num_gqa_groups=1),
            layer=te.TransformerLayer(32, 64, 2, self_attn_mask_type="no_mask", normalization="RMSNorm"),
            **{kind: mlp(kind) for kind in ("gelu", "qgeglu", "srelu", "swiglu", "clamped_swiglu")},
        )
    )
    program = translated(module, x_of(4), **dynamic_batch())
    standard(program)
    running = session(program)
    assert running.get_inputs()[0].shape == ["batch", 16, 32]
    for batch in (7, 1):
        expected = eager(module, x_of(batch, 1))
        for got, wanted in zip(run(running, x_of(batch, 1)), expected, strict=True):
            # Sums of up to 64 terms in another order, and functions of float32.
            assert (got - wanted).abs().max() <= 64 * EPS * wanted.abs().max()


def trained(module, recipe):
    """Scales in force that come from amaxes."""
    for seed in range(3):
        with te.autocast(recipe=recipe):
            sum(out.sum() for out in _flat(module(x_of(4, seed) * 0.7))).backward()
    return module


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_modules_with_one_scale_for_a_tensor(recipe):
    parts = Parts(
        linear=te.Linear(32, 64),
        mlp=mlp("swiglu", normalization="RMSNorm"),
        layer=te.TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
    )
    module = trained(initialized(parts), recipe)
    program = translated(module, x_of(4), recipe, **dynamic_batch())
    found = standard(program)
    assert found.count("QuantizeLinear") == found.count("DequantizeLinear") == 2 * (1 + 2 + 4)
    if isinstance(recipe, DelayedScaling):  # as constants: nothing is computed of the input's amax
        assert "ReduceMax" not in found
    running = session(program)
    x = x_of(7, 1)
    expected = eager(module, x, recipe)
    for i, (got, wanted) in enumerate(zip(run(running, x), expected, strict=True)):
        if i == 0:
            one_product(got, wanted, x, module.parts["linear"])
        # After the first cast a difference of float32 may take a later one to a neighbouring code, which is one step,
        # 1/8 at most, of one factor of some products.
        assert (got - wanted).abs().max() <= wanted.abs().max() / 8
        assert (got - wanted).abs().quantile(0.9) <= 128 * EPS * wanted.abs().max()


def one_product(got, wanted, x, linear):
    """Equal operands: each side sums K products in float32, whose factors are rounded once more at most."""
    weight = linear.weight.detach()
    bound = (2 * x.shape[-1] + 8) * EPS * (1.13 * x.abs() @ (1.13 * weight.abs()).t() + linear.bias.abs())
    assert ((got - wanted).abs() <= bound).all()


@pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)]
)
def test_blocks_are_standard_operators(recipe):
    """Casts round as eager does, whose product multiplies the same values: only the runtime's own sums differ."""
    module = initialized(Parts(linear=te.Linear(32, 64), second=te.LayerNormLinear(32, 64, normalization="RMSNorm")))
    program = translated(module, x_of(4), recipe, **dynamic_batch())
    standard(program)
    running = session(program)
    x = x_of(6, 1) * 100.0
    expected = eager(module, x, recipe)
    got = run(running, x)
    one_product(got[0], expected[0], x, module.parts["linear"])
    assert (got[1] - expected[1]).abs().max() <= expected[1].abs().max() / 8
    assert (got[1] - expected[1]).abs().quantile(0.9) <= 128 * EPS * expected[1].abs().max()


def test_onnxruntime_computes_what_the_operators_say():
    edges = [0.0, -0.0, 1e-9, 1e30, np.inf, -np.inf, np.nan, 57344.0, 61440.0]
    x = torch.cat((torch.tensor(edges), torch.randn(100) * 30))
    running = session(translated(Quantized(), x))
    for got, wanted in zip(run(running, x), eager(Quantized(), x), strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(1.0), wanted.nan_to_num(1.0))


def test_an_opset_without_fp8_is_refused():
    with pytest.raises(Exception, match="opset 18 has no FP8"):
        translated(te.Linear(32, 64), x_of(4), Float8CurrentScaling(), opset_version=18)


def test_half_precision():
    module, recipe, x = (
        initialized(te.Linear(32, 64, params_dtype=torch.float16)),
        Float8CurrentScaling(),
        x_of(4).half(),
    )
    program = translated(module, x, recipe, optimize=False)  # which renames small constants
    assert {"weight", "bias"} <= set(program.model.graph.initializers)
    (got,), (expected,) = run(session(program), x), eager(module, x, recipe)
    # One rounding to float16 on each side, of sums that differ in float32.
    assert got.dtype == torch.float16
    assert ((got - expected).abs().float() <= 2.0**-10 * expected.abs().float() + 1e-6).all()
