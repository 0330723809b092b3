# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with bias and residual add, in fp32. Contracts: `te_dispatch.ops.training`."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.ops.checks import training as checks
from te_dispatch.ops.results import DropoutAddForward
from te_dispatch_acme import memory
from te_dispatch_acme.memory import U8


def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward:
    """residual + dropout(x + bias). The mask is the interface's own, so any backend's backward may follow."""
    checks.dropout_add_fwd(x, residual, bias, dropout_p, rng_state)
    values, mask = memory.single("x", x), None
    if bias is not None:
        values = values + memory.single("bias", bias)
    if rng_state is not None and dropout_p > 0.0:
        kept = _draw(rng_state, tuple(x.shape), dropout_p)
        values = np.where(kept != 0, values / np.float32(1.0 - dropout_p), np.float32(0))
        mask = memory.codes("mask", kept, x.device)
    if residual is not None:
        values = values + memory.single("residual", residual)
    return DropoutAddForward(memory.result("out", values, x.dtype, x.device), mask)


def dropout_add_bwd(dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0) -> torch.Tensor:
    """dy * mask / (1 - p)."""
    checks.dropout_add_bwd(dy, mask, dropout_p)
    values = memory.single("dy", dy)
    if mask is not None:
        values = np.where(mask.numpy() != 0, values / np.float32(1.0 - dropout_p), np.float32(0))  # Inf falls, too
    return memory.result("dx", values, dy.dtype, dy.device)


def _draw(rng_state: torch.Tensor, shape: tuple[int, ...], dropout_p: float) -> U8:
    """1 where a value is kept: a function of (seed, offset) alone, as recomputation needs."""
    seed, offset = (int(value) % 2**64 for value in rng_state.tolist())
    # The offset is a part of the key: counted from there, the next state would draw most of these numbers again.
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, offset], dtype=np.uint64)))
    return (generator.random(shape, np.float32) >= dropout_p).astype(np.uint8)
