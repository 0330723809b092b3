# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the norms: both of them, rows that fit a program and rows that do not, every way to cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch_triton import norm, norm_gradients

_SHAPE, _LONG = (8192, 4096), (64, 65536)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and what makes the call."""
    yield from _forward()
    yield from _backward()


def _weights(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(shape, dtype=dtype), torch.empty(shape[1], dtype=dtype), torch.empty(shape[1], dtype=dtype)


def _forward() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        x, gamma, beta = _weights(_SHAPE, dtype)
        name = str(dtype).removeprefix("torch.")
        yield f"layernorm {name}", lambda x=x, gamma=gamma, beta=beta: norm.layernorm_fwd(x, gamma, beta)
        yield f"rmsnorm {name}", lambda x=x, gamma=gamma: norm.rmsnorm_fwd(x, gamma, residual=x)
    x, gamma, beta = _weights(_SHAPE, torch.bfloat16)
    for name, quantizer, usage in _casts():
        yield (
            f"layernorm, {name} {usage}",
            lambda q=quantizer, u=usage: norm.layernorm_fwd(x, gamma, beta, quantizer=q, usage=u, residual=x),
        )
    long, gamma_long, beta_long = _weights(_LONG, torch.bfloat16)
    yield "layernorm, long rows", lambda: norm.layernorm_fwd(long, gamma_long, beta_long, residual=long)


def _casts() -> Iterator[tuple[str, Any, str]]:
    scale, amax = torch.ones(1), torch.zeros(1)
    for encoding in ("e4m3fn", "e4m3fnuz"):
        for usage in ("row", "both"):
            yield f"delayed {encoding}", DelayedQuantizer(encoding, scale=scale, amax=amax), usage
    for usage in ("row", "both"):
        yield "current", CurrentQuantizer(), usage
        yield "block_1d", BlockQuantizer(), usage
        yield "block_2d", BlockQuantizer(two_d=True), usage
        yield "mxfp8", MXFP8Quantizer(), usage
        yield "nvfp4", NVFP4Quantizer(), usage


def _backward() -> Iterator[tuple[str, Callable[[], object]]]:
    for name, shape in (("", _SHAPE), (", short rows", (8192, 512)), (", long rows", _LONG)):
        x, gamma, _ = _weights(shape, torch.bfloat16)
        mean = torch.empty(shape[0])
        yield (
            f"layernorm gradients{name}",
            lambda x=x, gamma=gamma, mean=mean: norm_gradients.layernorm_bwd(x, x, gamma, mean, mean, add=x),
        )
        yield (
            f"rmsnorm gradients{name}",
            lambda x=x, gamma=gamma, mean=mean: norm_gradients.rmsnorm_bwd(x, x, gamma, mean),
        )
