# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts as graphs for ONNX have them, on tensors with data, against `te_dispatch.ops.quantize`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from te_dispatch import ops
from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
)
from te_dispatch.pytorch.export import lowering

pytestmark = pytest.mark.slow

BLOCKS = {
    "1x128": BlockQuantizer(),
    "1x128 float32 scales": BlockQuantizer(power_of_two=False, epsilon=1e-3),
    "128x128": BlockQuantizer(two_d=True, encoding="e5m2"),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8 e5m2": MXFP8Quantizer(encoding="e5m2"),
    "mxfp8_2d": MXFP8TileQuantizer(),
}


def of_all_magnitudes(rows, columns, seed=0):
    """Blocks of every exponent that float32 has, zeros, infinities and NaN; incomplete blocks at the edges."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.linspace(-149, 127, rows).round().unsqueeze(1)
    x = torch.ldexp(torch.rand(rows, columns, generator=generator) * 2 - 1, exponent)
    x[3], x[4, 0], x[5, 1], x[6, 2], x[7] = 0.0, math.inf, -math.inf, math.nan, math.nan
    # Amaxes on powers of two times the maxima of the encodings, and next to them, where exponents change.
    x[8, 0], x[9, 0], x[10, 0], x[11, 0] = 448.0, 448.0 * (1 + 2**-23), 57344.0, 448.0 * (1 - 2**-24)
    x[8:12, 1:] = 0.5
    return x


def recorded(x, quantizer):
    """What the graph computes, on real tensors."""
    return lowering._quantize(None, x, quantizer, "row", None, None, None, None).row_data


def eager(x, quantizer):
    return ops.dequantize(ops.quantize(x, quantizer, usage="row"), dtype=torch.float32)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(1.0), b.nan_to_num(1.0))


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_values_of_eager(name, common):
    quantizer = replace(BLOCKS[name], common=common)
    for x in (of_all_magnitudes(277, 200), of_all_magnitudes(277, 200, seed=1).to(torch.bfloat16)):
        assert same(recorded(x, quantizer), eager(x, quantizer))


@pytest.mark.parametrize("error", [-0.6, -1e-6, 1e-6, 0.6])
def test_exponents_do_not_depend_on_the_digits_of_a_logarithm(error, monkeypatch):
    log2, x = torch.log2, of_all_magnitudes(277, 64)
    expected = eager(x, MXFP8Quantizer())
    monkeypatch.setattr(torch, "log2", lambda t: log2(t) + error)
    assert same(recorded(x, MXFP8Quantizer()), expected)


@pytest.mark.parametrize("encoding", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_scale_for_a_tensor(encoding, common, dtype):
    """Also on ties, on which values of 16 bits with a scale from their own amax often are."""
    x = torch.randn(500, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for quantizer in (
        CurrentQuantizer(encoding, common),
        DelayedQuantizer(encoding, common, scale=torch.tensor([97.3])),
    ):
        assert same(recorded(x, quantizer), eager(x, quantizer))
    x[0, :5] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    got = recorded(x, quantizer)
    assert same(got, eager(x, quantizer))
    maximum = ENCODINGS[encoding].common_max if common else ENCODINGS[encoding].max
    assert got[0, 0] == torch.tensor(maximum) * (torch.ones(1) / quantizer.scale)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scales(power_of_two):
    quantizer = CurrentQuantizer(power_of_two=power_of_two, epsilon=1e-6)
    for magnitude in (0.0, 1e-30, 1e-7, 1.0, 448.0, 2.0**100, math.inf, math.nan):
        x = torch.tensor([[0.25, -0.5, 1.0, math.nan]]) * magnitude
        record = lowering._quantize(None, x, quantizer, "row", None, None, None, None)
        assert torch.equal(record.row_scale_inv, ops.quantize(x, quantizer, usage="row").row_scale_inv)
        assert same(record.row_data, eager(x, quantizer))
