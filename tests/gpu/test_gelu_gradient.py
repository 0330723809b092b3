# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""GELU's gradient as an epilogue, far from where it changes: each backend computes it in a kernel of its own."""

from __future__ import annotations

import pytest
import torch

import te_dispatch
from te_dispatch import ops


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_gelu_s_gradient_where_the_square_overflows(backend: str) -> None:
    """It is 1, or 0, far from 0."""
    pytest.importorskip(f"te_dispatch_{backend}.gemm_plans", exc_type=ImportError)
    torch.manual_seed(0)
    a, b = (torch.randn(32, 48, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    aux = torch.full((32, 32), 1e30, device="cuda", dtype=torch.bfloat16)
    aux[:, ::2] *= -1
    with te_dispatch.using(gemm=backend):
        found = ops.gemm(a, b, layout="NT", aux=aux, epilogue="dgelu", out_dtype=torch.float32)
    exact = (a.double() @ b.double().t()).float()
    exact[:, ::2] = 0
    torch.testing.assert_close(found.out, exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.dbias, exact.sum(0), rtol=1e-3, atol=1e-2)
