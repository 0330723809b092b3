# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What surrounds the operators that modules call: the forward's policy, and arithmetic that nobody changes.

A backward may run in a device thread of autograd, which sees no context variable, or after the scope of the forward
was closed. So every autograd Function keeps `scopes.capture()` on its `ctx` as `ctx.scope`, and decorates its
backward with `in_forward_scope`.

torch.autocast must not reach into an operator: it would lower the precision of single steps inside an implementation
written in PyTorch. What it asks for, a dtype, is done to the inputs before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.tensor.casting import detached
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor
from te_dispatch.torch_private import any_autocast


def autocast_off() -> bool:
    """Whether it is certain at little cost that torch.autocast is off; never while compiling."""
    return not torch.compiler.is_dynamo_compiling() and not any_autocast()


def outside_autocast(function: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """`function(x, *args)` with torch.autocast off."""
    if autocast_off():
        return function(x, *args)
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return function(x, *args)
    with torch.autocast(device_type, enabled=False):
        return function(x, *args)


def in_forward_scope(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a Function's `backward(ctx, *gradients)` under its forward's policy, `ctx.scope`, and without torch.autocast.

    It is given the values of gradients that come quantized; `in_forward_scope_as_is` leaves them as they are.

    Raises:
        RuntimeError: under ``create_graph=True``: the operators inside record no graph, and gradients would be lost.
    """

    @functools.wraps(backward)
    def of_values(ctx: Any, *gradients: Any) -> Any:
        for gradient in gradients:
            if gradient.__class__ is QuantizedTensor:
                return backward(ctx, *[detached(gradient) for gradient in gradients])
        return backward(ctx, *gradients)

    return in_forward_scope_as_is(of_values)


def in_forward_scope_as_is(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`in_forward_scope` for a backward that takes a `QuantizedTensor` for a gradient."""

    @functools.wraps(backward)
    def scoped(ctx: Any, *gradients: Any) -> Any:
        if autocast_off() and scopes.capture() is ctx.scope and not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        device_type = gradients[0].device.type
        if torch.compiler.is_compiling():
            # Traced with its forward, and so under its policy. torch.autocast must be switched off in any case: what
            # is seen while tracing is the forward's surroundings, where the module has switched it off, while the
            # compiler lets the backward run under what is on around the whole region.
            with torch.autocast(device_type, enabled=False):
                return backward(ctx, *gradients)
        if torch.is_grad_enabled():
            raise RuntimeError("te_dispatch modules have no second derivative: call backward without create_graph=True")
        if scopes.capture() is ctx.scope and not torch.is_autocast_enabled(device_type):
            return backward(ctx, *gradients)
        with torch.autocast(device_type, enabled=False), scopes.reenter(ctx.scope):
            return backward(ctx, *gradients)

    return scoped
