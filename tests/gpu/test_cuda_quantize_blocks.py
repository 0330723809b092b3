# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of the cuda backend that the conformance kit does not make: more tensors than a launch takes, views at odd
addresses, whole tiles beside edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

pytest.importorskip("te_dispatch_cuda._native", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"
)

COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
QUANTIZERS = (
    BlockQuantizer(), BlockQuantizer("e5m2", True, power_of_two=False), BlockQuantizer(two_d=True), MXFP8Quantizer(),
    MXFP8Quantizer("e4m3fnuz"), NVFP4Quantizer(), NVFP4Quantizer(two_d=True), CurrentQuantizer(),
)  # fmt: skip


def equal(a: Any, b: Any) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("shape", [(384, 640), (400, 648), (129, 1160)])
@pytest.mark.parametrize("offset", [0, 1])
def test_whole_tiles_and_edges(quantizer: Quantizer, shape: tuple[int, int], offset: int) -> None:
    from te_dispatch_cuda.quantize import quantize
    from te_dispatch_torch.quantize import quantize as portable

    torch.manual_seed(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        memory = torch.randn(shape[0] * shape[1] + offset, device="cuda").to(dtype)
        x = memory[offset:].view(shape)
        for usage in ("both", "row", "column"):
            equal(quantize(x, quantizer, usage=usage), portable(x, quantizer, usage=usage))


@pytest.mark.parametrize("kind", ["delayed", "current", "block_1d", "block_2d", "mxfp8", "nvfp4"])
def test_more_tensors_than_one_launch_takes(kind: str) -> None:
    from te_dispatch_cuda.quantize_many import multi_tensor_quantize, split_quantize
    from te_dispatch_torch.quantize import quantize as portable

    def made(i: int) -> Quantizer:
        if kind == "delayed":
            return DelayedQuantizer(
                scale=torch.full((1,), 0.5 + i, device="cuda"), amax=torch.zeros(1, device="cuda") if i % 3 else None
            )
        if kind == "current":
            return CurrentQuantizer(epsilon=0.1 * i)
        if kind.startswith("block"):
            return BlockQuantizer(two_d=kind == "block_2d", epsilon=0.1 * i)
        return MXFP8Quantizer() if kind == "mxfp8" else NVFP4Quantizer()

    torch.manual_seed(4)
    shapes = [(i * 37 % 300, 40 + i % 3 * 100) for i in range(70)]
    xs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    ours, theirs = [made(i) for i in range(70)], [made(i) for i in range(70)]
    for found, x, quantizer in zip(multi_tensor_quantize(xs, ours, usage="both"), xs, theirs):
        equal(found, portable(x, quantizer, usage="both"))
    if kind == "delayed":
        for a, b in zip(ours, theirs):
            assert a.amax is None or torch.equal(a.amax, b.amax)  # type: ignore[union-attr]
    whole = torch.randn(2560, 136, device="cuda", dtype=torch.bfloat16)
    splits = [0, 128, 33, 1024, 1375, 0]
    for found, x, quantizer in zip(
        split_quantize(whole, splits, ours[:6], usage="both"), whole.split(splits), theirs[:6]
    ):
        equal(found, portable(x, quantizer, usage="both"))
