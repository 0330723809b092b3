# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calling an autograd Function without what none of ours needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.torch_private import transforms_active, unwrap_if_dead

_TRANSFORMS = (
    "modules and functions of te_dispatch.pytorch do not support the transforms of torch.func (grad, vjp, vmap, jvp, "
    "jacrev, hessian): operators record no graph to transform; use backward() or torch.autograd.grad"
)


#: Whether tapes see the calls of Functions.
TAPES = transforms_active is not None and unwrap_if_dead is not None


class _Thread(threading.local):
    """Attributes:
    tape: what makes this thread's calls of Functions, `te_dispatch.pytorch.capture.tape.Tape`; None for autograd.
    """

    tape: Any = None


thread = _Thread()


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for positional arguments of which the first is the only one that a user computed.

    `torch.autograd.Function.apply` looks through all arguments for tensors that outlived a functorch transform, after
    tests for what our Functions do not have (keywords, ``setup_context``). That is a tenth of what a Function costs.
    Traced it is `function.apply`.

    Raises:
        NotImplementedError: inside a transform of torch.func.
    """
    if not TAPES:
        return function.apply
    assert transforms_active is not None and unwrap_if_dead is not None
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(x: Any, *rest: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function.apply(x, *rest)
        if thread.tape is not None:
            return thread.tape.call(function, (x, *rest))
        if transforms_active():
            raise NotImplementedError(_TRANSFORMS)
        return direct(unwrap_if_dead(x), *rest)

    return apply
