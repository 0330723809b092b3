# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Values whose squares and products leave fp32 on the way to results that fp32 holds, and how results lie in memory."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, MXFP8Quantizer
from te_dispatch.ops.activation import KINDS
from te_dispatch_torch import activation, gemm, quantize, softmax, training

reference_activation = pytest.importorskip("te_dispatch_reference.activation")
reference_softmax = pytest.importorskip("te_dispatch_reference.softmax")
reference_training = pytest.importorskip("te_dispatch_reference.training")

HUGE = [3.3e38, -3.3e38, 1e30, -1e30, 1.9e19, -1.9e19, 1e10, -1e10, 200.0, -200.0, 30.0, -30.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_huge_values_are_those_of_the_formula(kind: str, dtype: torch.dtype) -> None:
    x = torch.tensor(HUGE, dtype=dtype).unsqueeze(1)
    gated = kind == "glu" or kind.endswith(("glu", "swiglu"))
    if gated:
        x = torch.cat((x, torch.ones_like(x)), 1)
    dy = torch.ones(len(HUGE), 1, dtype=dtype)
    got = activation.activation_bwd(dy, x, kind=kind).dx
    want = reference_activation.activation_bwd(dy, x, kind=kind).dx
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-8)


def test_the_gelu_epilogues_gradient_of_huge_values() -> None:
    aux = torch.tensor(HUGE).unsqueeze(0)
    got = gemm.matmul(torch.ones(1, 4), torch.ones(4, 12), layout="NN", epilogue="dgelu", aux=aux).out
    assert got.tolist() == [[4.0 if x > 0 else 0.0 for x in HUGE]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_nothing_but_minus_infinity_is_0(masked: bool, causal: bool) -> None:
    x = torch.randn(1, 1, 6, 6)
    x[..., 2, :] = -torch.inf
    x[..., 3, 2:] = -torch.inf
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[..., 3, :2] = True
        mask[..., 4, :] = True
    got = softmax.softmax_fwd(x, mask, causal=causal)
    want = reference_softmax.softmax_fwd(x, mask, causal=causal)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert not got[..., 2, :].any() and not got.isnan().any()


def test_softmax_keeps_a_nan_in_its_row() -> None:
    x = torch.randn(3, 5)
    x[1, 2] = torch.nan
    got = softmax.softmax_fwd(x)
    assert got[1].isnan().all() and not got[[0, 2]].isnan().any()
    assert softmax.softmax_fwd(torch.ones(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("value", [1e30, 1e-30, 2e-38, 3e19, 1.0, 0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_hold_what_fp32_holds(value: float, dtype: torch.dtype, per_tensor: bool) -> None:
    tensors = [torch.full((4, 3), value, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(5, dtype=dtype) * 1e-37]
    got = training.multi_tensor_l2norm(tensors, per_tensor=per_tensor)
    want = reference_training.multi_tensor_l2norm(tensors, per_tensor=per_tensor)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0, equal_nan=True)


def test_values_of_a_column_wise_record_are_row_major() -> None:
    x = torch.randn(256, 384)
    for quantizer in (CurrentQuantizer(), BlockQuantizer(), MXFP8Quantizer()):
        record = quantize.quantize(x, quantizer, usage="column")
        assert record.row_data is None
        for dtype in (torch.float32, torch.bfloat16):
            assert quantize.dequantize(record, dtype=dtype).is_contiguous()
