# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What several test modules need: inputs that provoke, quantizers to enumerate, comparison by bits."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

MEMBERS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


def every_bf16() -> torch.Tensor:
    """All 2^16 bf16 values, NaN of both signs and all payloads included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def random_bits(count: int, seed: int) -> torch.Tensor:
    """fp32 of uniformly random bit patterns, a quarter of them rescaled into the range that FP8 resolves."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32).clone()
    exponent = torch.randint(127 - 18, 127 + 18, (count,), generator=generator).to(torch.int32)
    near = ((bits & -0x7F800001) | (exponent << 23)).view(torch.float32)
    return torch.where(torch.arange(count) % 4 < 3, near, x)


def quantizers(encoding: str, common: bool) -> list[Any]:
    """One of every kind; delayed ones record an amax."""
    return [
        DelayedQuantizer(encoding, common, scale=torch.tensor([1.7]), amax=torch.zeros(1)),
        DelayedQuantizer(encoding, common, scale=torch.tensor([2.0**-5]), amax=None),
        CurrentQuantizer(encoding, common),
        CurrentQuantizer(encoding, common, power_of_two=True, epsilon=1e-3),
        BlockQuantizer(encoding, common),
        BlockQuantizer(encoding, common, power_of_two=False, epsilon=1e-6),
        BlockQuantizer(encoding, common, two_d=True),
        BlockQuantizer(encoding, common, two_d=True, power_of_two=False),
        MXFP8Quantizer(encoding, common),
    ]


def fp4_quantizers() -> list[Any]:
    return [NVFP4Quantizer(), NVFP4Quantizer(two_d=True)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_bytes = [x.contiguous().view(-1).view(torch.uint8) if x.numel() else x for x in (a, b)]
    return torch.equal(as_bytes[0], as_bytes[1])


def assert_same_bits(a: Any, b: Any, name: str = "result") -> None:
    """Equal shape, dtype and bits, through records and named tuples."""
    if isinstance(a, Quantized):
        assert (a.encoding, a.scaling, a.scale_layout, tuple(a.shape), a.dtype) == (
            b.encoding, b.scaling, b.scale_layout, tuple(b.shape), b.dtype,
        ), name  # fmt: skip
        for member in MEMBERS:
            assert_same_bits(getattr(a, member), getattr(b, member), f"{name}.{member}")
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), name
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{name}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert same_bits(a, b), f"{name}: {tuple(a.shape)} {a.dtype} differs from {tuple(b.shape)} {b.dtype}"
    elif a is None:
        assert b is None, f"{name}: None here, not there"
