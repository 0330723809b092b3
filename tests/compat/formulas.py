# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the tests of the plugin's functions share: inputs, formulas in float64, comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing import assert_close

TWO_DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def reference(formula: Any, dy: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The formula's value in float64, and its gradients."""
    leaves = [x.double().requires_grad_() for x in inputs]
    y = formula(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy.double()))


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(ours, expected.to(ours.dtype))


def served(tex: Any) -> set[str]:
    """What was called, after making sure that nothing went to the native module."""
    assert tex.__te_dispatch__.native.CALLS == [] and not tex.__te_dispatch__.passed_on
    return set(tex.__te_dispatch__.served)
