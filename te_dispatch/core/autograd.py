# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calling implementations that consist of PyTorch's operators with autograd and torch.autocast off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen

if TYPE_CHECKING:
    from te_dispatch.core.operator import Operator


def bound_below_autograd(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    """`below_autograd` of a bound implementation, which takes all of the operator's arguments by position. This is how
    implementations with the trait ``plain_torch`` are bound."""
    import torch  # which such a function has imported: the runtime itself does without

    from te_dispatch.torch_private import any_autocast, set_grad_enabled

    settings = {
        "is_tracing": torch.compiler.is_dynamo_compiling,
        "any_autocast": any_autocast,
        "is_grad_enabled": torch.is_grad_enabled,
        "set_grad_enabled": set_grad_enabled,  # a third of what torch.no_grad takes
    }
    return codegen.switching(operator, function, below_autograd(function), settings)


def below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.autocast off, and without gradients being recorded: an operator computes in the dtypes
    that its contract says, and what it writes into a caller's tensors is no part of a graph.

    An implementation with the trait ``plain_torch`` is wrapped when it is bound; others that call PyTorch's operators
    have this as a decorator.
    """
    import torch

    from te_dispatch.torch_private import any_autocast, set_grad_enabled

    recording = torch.is_grad_enabled
    accelerator = torch.accelerator.current_accelerator()
    slow_path = _without_kind("cpu", function)
    if accelerator is not None:
        slow_path = _without_kind(accelerator.type, slow_path)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or any_autocast():
            with torch.no_grad():
                return slow_path(*args, **keywords)
        if not recording():
            return function(*args, **keywords)
        set_grad_enabled(False)
        try:
            return function(*args, **keywords)
        finally:
            set_grad_enabled(True)

    return call


def _without_kind(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with autocast off for one device type."""
    import torch

    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.is_autocast_enabled(kind):
            return function(*args, **keywords)
        with torch.autocast(kind, enabled=False):
            return function(*args, **keywords)

    return call
