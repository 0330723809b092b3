# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax of the cuda backend with scales at the edges of their range, by rows in registers and read in pieces."""

from __future__ import annotations

import pytest
import torch

softmax = pytest.importorskip("te_dispatch_cuda.softmax")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
COLUMNS = (64, 1024, 1001, 9000)


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_scale_of_0_makes_what_counts_equal(columns: int) -> None:
    torch.manual_seed(columns)
    x = torch.randn(1, 1, 16, columns, device=DEVICE)
    mask = torch.rand(1, 1, 16, columns, device=DEVICE) < 0.5
    mask[..., 3, :] = True
    y = softmax.softmax_fwd(x, mask, scale=0.0)
    counts = (~mask).sum(-1, keepdim=True)
    expected = torch.where(mask, 0.0, 1.0 / counts)
    torch.testing.assert_close(y, expected)
    assert torch.count_nonzero(y[mask]) == 0


@pytest.mark.parametrize("scale", [2.0, -2.0])
@pytest.mark.parametrize("columns", COLUMNS)
def test_products_with_the_scale_may_overflow(columns: int, scale: float) -> None:
    x = torch.full((1, 1, 4, columns), 1.0, device=DEVICE)
    x[..., 5] = 3e38 if scale > 0 else -3e38
    y = softmax.softmax_fwd(x, scale=scale)
    expected = torch.zeros_like(x)
    expected[..., 5] = 1.0
    assert torch.equal(y, expected)
