# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the conformance kit found in PyTorch's own GPU kernels, kept found: operands that are not aligned, an `out` that
the memory-efficient backward reads as if it lay otherwise, a lone query that cuDNN has no backward for.
"""

from __future__ import annotations

import pytest
import torch

from te_dispatch.conformance import Settings, certify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_operands_that_lie_anyhow(family: str) -> None:
    checks = (
        ("strided", "offset", "stream", "saved_format") if family == "attention" else ("strided", "offset", "stream")
    )
    settings = Settings(("torch",), operators=(family,), level="full", checks=checks, jobs=4)
    report = certify(settings=settings)
    assert report.counts["passed"] > 0
    assert not report.failures(), "\n".join(f"{o.unit}\n  {o.message}" for o in report.failures())


def test_packed_attention() -> None:
    report = certify(
        settings=Settings(("torch",), operators=("attention_bwd",), level="full", checks=("values",), jobs=8)
    )
    ran = {o.parsed.implementation for o in report.outcomes if o.state == "passed"}
    assert {"torch.sdpa_efficient_bwd", "torch.sdpa_cudnn_bwd", "torch.sdpa_flash_bwd"} <= ran
    assert not report.failures(), "\n".join(f"{o.unit}\n  {o.message}" for o in report.failures())
