# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tensors that an autograd Function keeps for its backward, by Transformer Engine's protocol.

There some quantized tensors are no tensors, so that a Function takes them apart before ``ctx.save_for_backward`` and
puts them together again. A `QuantizedTensor` is a tensor: it goes through as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def prepare_for_saving(*tensors: torch.Tensor | None) -> tuple[list[torch.Tensor | None], list[None]]:
    """What to give ``ctx.save_for_backward``, and what to keep as ``ctx.tensor_objects``.

    Raises:
        TypeError: something that is no tensor.
    """
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"prepare_for_saving takes tensors and None, got {type(tensor).__name__}")
    return list(tensors), [None] * len(tensors)


def restore_from_saved(
    tensors: Sequence[None], saved_tensors: Sequence[torch.Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """The tensors that `prepare_for_saving` was given.

    Args:
        tensors: the second list that it returned. saved_tensors: ``ctx.saved_tensors``; more may come behind.
        return_saved_tensors: also return those behind.
    """
    count, saved = len(tensors), list(saved_tensors)
    return (saved[:count], saved[count:]) if return_saved_tensors else saved[:count]


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` with ``ctx.tensor_objects``, which becomes None, and ``ctx.saved_tensors``.

    Raises:
        AttributeError: `ctx` has no ``tensor_objects``, or they have been restored.
    """
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("restore_from_func_ctx: ctx has no tensor_objects, or they have been restored already")
    tensors, ctx.tensor_objects = ctx.tensor_objects, None
    return restore_from_saved(tensors, ctx.saved_tensors, return_saved_tensors)
