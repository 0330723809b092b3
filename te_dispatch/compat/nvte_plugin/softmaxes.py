# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The scaled and masked softmaxes of unfused attention.

The native gradients overwrite the gradient that they are given and return it; these return a tensor of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, plain, require


def scaled_softmax_forward(input: Any, scale_factor: float) -> torch.Tensor:
    floats(input)
    return ops.softmax_fwd(input, scale=scale_factor)


def scaled_masked_softmax_forward(input: Any, mask: Any, scale_factor: float) -> torch.Tensor:
    floats(input)
    plain(mask)
    require(mask.dtype == torch.bool, f"a mask of {mask.dtype}")
    return ops.softmax_fwd(input, mask, scale=scale_factor)


def scaled_upper_triang_masked_softmax_forward(input: Any, scale_factor: float) -> torch.Tensor:
    floats(input)
    return ops.softmax_fwd(input, scale=scale_factor, causal=True)


def scaled_aligned_causal_masked_softmax_forward(input: Any, scale_factor: float) -> torch.Tensor:
    """The last query sees all keys, where the operator's `causal` lets the first query see the first key."""
    floats(input)
    queries, keys = input.shape[-2:]
    require(queries <= keys, "more queries than keys")
    if queries == keys:
        return ops.softmax_fwd(input, scale=scale_factor, causal=True)
    mask = torch.ones((queries, keys), dtype=torch.bool, device=input.device).triu_(keys - queries + 1)
    return ops.softmax_fwd(input, mask, scale=scale_factor)


def _backward(output_grads: Any, softmax_results: Any, scale_factor: float) -> torch.Tensor:
    floats(output_grads, softmax_results)
    return ops.softmax_bwd(output_grads, softmax_results, scale=scale_factor)


ADAPTERS: dict[str, Callable[..., Any]] = {
    "scaled_softmax_forward": scaled_softmax_forward,
    "scaled_masked_softmax_forward": scaled_masked_softmax_forward,
    "scaled_upper_triang_masked_softmax_forward": scaled_upper_triang_masked_softmax_forward,
    "scaled_aligned_causal_masked_softmax_forward": scaled_aligned_causal_masked_softmax_forward,
    "scaled_softmax_backward": _backward,
    "scaled_masked_softmax_backward": _backward,
    "scaled_upper_triang_masked_softmax_backward": _backward,
    "scaled_aligned_causal_masked_softmax_backward": _backward,
}
