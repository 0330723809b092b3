# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the activations: every function, every way to cast, records as input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.activation import GATED, KINDS
from te_dispatch_triton import activation

_ROWS, _COLUMNS = 8192, 16384


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and what makes the call."""
    for kind in KINDS:
        x, dy = _operands(kind)
        yield f"{kind}", lambda x=x, k=kind: activation.activation_fwd(x, kind=k)
        yield f"{kind} gradient", lambda x=x, dy=dy, k=kind: activation.activation_bwd(dy, x, kind=k, with_dbias=True)
    for kind in ("gelu", "swiglu"):
        x, dy = _operands(kind)
        for name, quantizer, usage in _casts():
            yield (
                f"{kind}, {name} {usage}",
                lambda x=x, k=kind, q=quantizer, u=usage: activation.activation_fwd(x, kind=k, quantizer=q, usage=u),
            )
            yield (
                f"{kind} gradient, {name} {usage}",
                lambda x=x, dy=dy, k=kind, q=quantizer, u=usage: activation.activation_bwd(
                    dy, x, kind=k, quantizer=q, usage=u, with_dbias=u == "both"
                ),
            )
    yield from _records()


def _operands(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy, of which nothing is ever touched."""
    width = 2 * _COLUMNS if kind in GATED else _COLUMNS
    return torch.empty((_ROWS, width), dtype=torch.bfloat16), torch.empty((_ROWS, _COLUMNS), dtype=torch.bfloat16)


def _casts() -> Iterator[tuple[str, Any, str]]:
    scale, amax = torch.ones(1), torch.zeros(1)
    for usage in ("row", "both"):
        for encoding in ("e4m3fn", "e4m3fnuz", "e5m2"):
            yield f"delayed {encoding}", DelayedQuantizer(encoding, scale=scale, amax=amax), usage
        yield "current", CurrentQuantizer(), usage
        yield "block_1d", BlockQuantizer(), usage
        yield "block_2d", BlockQuantizer(two_d=True), usage
        yield "mxfp8", MXFP8Quantizer(), usage
        yield "nvfp4", NVFP4Quantizer(), usage


def _records() -> Iterator[tuple[str, Callable[[], object]]]:
    codes, one = torch.empty((_ROWS, _COLUMNS), dtype=torch.uint8), torch.ones(1)
    dy = torch.empty((_ROWS, _COLUMNS), dtype=torch.bfloat16)
    quantizer = DelayedQuantizer("e5m2", scale=one, amax=one)
    for encoding in ("e4m3fn", "e4m3fnuz"):
        x = Quantized(
            codes, None, one, None, encoding, "tensor", CANONICAL_SCALES, (_ROWS, _COLUMNS), torch.bfloat16,
            codes.device,
        )  # fmt: skip
        yield f"gelu of {encoding}", lambda x=x: activation.activation_fwd(x, kind="gelu")
        yield (
            f"gelu gradient of {encoding}, delayed both",
            lambda x=x: activation.activation_bwd(
                dy, x, kind="gelu", quantizer=quantizer, usage="both", with_dbias=True
            ),
        )
