# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products whose launches are kept have the bits of the same products made for the first time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch import ops
from te_dispatch.backend_kit import caches
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer

gemm = pytest.importorskip("te_dispatch_cuda.gemm", exc_type=ImportError)
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
#: m, n, k: the operands of one layout have the shapes of another's.
SIZES = ((128, 256, 384), (128, 128, 256), (256, 256, 128), (128, 128, 128))


def operands(kind: str, layout: str, sizes: tuple[int, int, int]) -> tuple[Any, Any]:
    m, n, k = sizes
    shapes = (k, m) if layout == "TN" else (m, k), (n, k) if layout == "NT" else (k, n)
    plain = [torch.randn(shape, device=DEVICE).to(torch.float16 if kind == "fp16" else BF16) for shape in shapes]
    if kind in ("bf16", "fp16"):
        return plain[0], plain[1]
    if kind == "blocks":
        quantizers: list[Any] = [BlockQuantizer("e4m3fn"), BlockQuantizer("e4m3fn", two_d=layout == "NT")]
    else:
        quantizers = [CurrentQuantizer("e5m2" if kind == "e5m2" else "e4m3fn"), CurrentQuantizer("e4m3fn")]
    a, b = (ops.quantize(x, q, usage="both") for x, q in zip(plain, quantizers, strict=True))
    return a, b


def test_known_products_have_the_bits_of_new_ones() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 units")
    kinds = ["fp8", "e5m2", "bf16", "fp16", *(["blocks"] if torch.cuda.get_device_capability()[0] == 9 else [])]
    calls: list[Any] = []
    for kind in kinds:
        operator = gemm.gemm if kind in ("bf16", "fp16") else gemm.gemm_codes
        for layout in ("NT", "NN", "TN"):
            for sizes in SIZES:
                bias = torch.randn(sizes[1], device=DEVICE, dtype=BF16)
                for options in ({}, {"bias": bias}, {"out_dtype": torch.float32}, {"alpha": 0.5}):
                    pair = operands(kind, layout, sizes)
                    calls.append((operator, pair, {"layout": layout, "out_dtype": BF16, **options}))

    def make() -> list[torch.Tensor]:
        return [operator(*pair, **options).out for operator, pair, options in calls]

    first = make()
    make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm.checks, "gemm", None)  # what is known is not checked again
        known = make()
    new = []
    for operator, pair, options in calls:
        caches.clear("te_dispatch_cuda.gemm.")
        new.append(operator(*pair, **options).out)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, known, new, strict=True))
