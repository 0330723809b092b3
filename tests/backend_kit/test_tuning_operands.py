# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands that tuners multiply: as a call's facts describe them, and finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.backend_kit.tuning_operands import random_operands
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import gemm as checks
from te_dispatch_reference.quantize import dequantize

SIZES = {"m": 48, "n": 32, "k": 64}
CPU = torch.device("cpu")


def canonical(operand: str, scaling: str) -> str:
    return "canonical"


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_operands_lie_as_the_layout_says(layout: str, dtype: str) -> None:
    call: dict[str, Any] = {**SIZES, "layout": layout, "a.dtype": dtype, "b.dtype": dtype, "bias": True}
    given = random_operands(call, CPU, canonical)
    shape = checks.gemm(given.a, given.b, layout, given.out, True, given.bias)
    assert shape == (48, 32) and given.a.dtype == given.out.dtype and given.a_scale is given.b_scale is None
    tensors = (given.a, given.b, given.out, given.bias)
    assert given.bytes() == sum(x.numel() * x.element_size() for x in tensors if x is not None)


@pytest.mark.parametrize("scaling", ["tensor", "block_1d", "block_2d", "mxfp8"])
@pytest.mark.parametrize("encoding", ["e4m3fn", "e5m2", "e4m3fnuz"])
def test_codes_are_numbers_with_scales_of_one(scaling: str, encoding: str) -> None:
    call = {**SIZES, "layout": "TN", "out_dtype": "fp32"}
    for side in "ab":
        call |= {f"{side}.dtype": encoding, f"{side}.scaling": scaling}
    given = random_operands(call, CPU, canonical)
    assert given.out.dtype == torch.float32 and given.bias is None
    # Contracted along their last dimension, whatever the layout is.
    for data, scale, shape in ((given.a, given.a_scale, (48, 64)), (given.b, given.b_scale, (32, 64))):
        x = Quantized(data, None, scale, None, encoding, scaling, "canonical", shape, torch.float32, CPU)
        values = dequantize(x)
        assert bool(values.isfinite().all()) and bool((values < 0).any()) and bool((values > 0).any())
        plain = Quantized(
            data, None, torch.ones(1), None, encoding, "tensor", "canonical", shape, torch.float32, CPU
        )  # fmt: skip
        torch.testing.assert_close(values, dequantize(plain))
