# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations of the Triton backend: fused casts by bytes in the sizes that choose its kernels, and wide addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import activation as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.activation import GATED, KINDS

activation = pytest.importorskip("te_dispatch_triton.activation")
quantize = pytest.importorskip("te_dispatch_triton.quantize")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


def delayed(encoding: str) -> DelayedQuantizer:
    return DelayedQuantizer(encoding, scale=torch.full((1,), 3.0, device=DEVICE), amax=torch.zeros(1, device=DEVICE))


QUANTIZERS: dict[str, Any] = {
    "delayed": lambda: delayed("e4m3fn"),
    "delayed e5m2": lambda: delayed("e5m2"),
    "current": CurrentQuantizer,
    "block_1d": BlockQuantizer,
    "block_2d": lambda: BlockQuantizer(two_d=True),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
}


@pytest.mark.parametrize("shape", [(512, 1024), (511, 1024), (300, 1000)], ids=str)
@pytest.mark.parametrize("usage", ["row", "column", "both"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("cast", QUANTIZERS)
def test_casts_have_the_bytes_of_the_values_and_a_cast(
    cast: str, kind: str, usage: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(shape[0])
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    x = torch.randn(shape[0], shape[1] * (2 if kind in GATED else 1), device=DEVICE).bfloat16() * 4
    x[3, 5], x[7, 1] = torch.inf, torch.nan
    fused, apart = QUANTIZERS[cast](), QUANTIZERS[cast]()
    made = activation.activation_bwd(dy, x, kind=kind, quantizer=fused, usage=usage, with_dx=True, with_dbias=True)
    values = activation.activation_bwd(dy.float(), x, kind=kind)
    assert torch.equal(made.dx.nan_to_num(7.0), values.dx.bfloat16().nan_to_num(7.0))
    expected = quantize.quantize(values.dx, apart, usage=usage)
    for name in COPIES:
        left, right = getattr(made.dx_quantized, name), getattr(expected, name)
        assert (left is None) == (right is None) and (left is None or torch.equal(left, right)), name
    finite = values.dx.isfinite().all(0)
    sums = values.dx.double().sum(0).float()
    torch.testing.assert_close(made.dbias.float()[finite], sums[finite], rtol=1e-2, atol=1e-2)
    if cast.startswith("delayed"):
        assert torch.equal(fused.amax, apart.amax)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_every_16_bit_number(kind: str) -> None:
    """By the kit's bounds: where tanh cancels, no two ways to compute gelu agree in relative terms."""
    x = torch.arange(65536, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(256, 256)
    x = x[x.isfinite().all(1)]
    actual = activation.activation_fwd(x, kind=kind, out_dtype=torch.float32).out.cpu()
    known = bounds.forward(Known.exactly(x.cpu()), kind, None)
    expected = known.value.float()
    finding = judge("out", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


def test_more_elements_than_32_bits_count(room: Any) -> None:
    room(16)
    rows, columns = 65664, 32768
    x = torch.full((rows, columns), 2.0, device=DEVICE, dtype=torch.bfloat16)
    x[-1, -1] = 3.0
    made = activation.activation_fwd(x, kind="relu", quantizer=delayed("e4m3fn"), usage="both").out_quantized
    small = activation.activation_fwd(x[-4:], kind="relu", quantizer=delayed("e4m3fn"), usage="both").out_quantized
    assert torch.equal(made.row_data[-4:], small.row_data)
    assert torch.equal(made.col_data[:, -4:], small.col_data)
    line = activation.activation_fwd(x, kind="relu", quantizer=delayed("e4m3fn")).out_quantized
    assert torch.equal(line.row_data[-4:], small.row_data)
