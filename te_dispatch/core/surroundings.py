# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations that consist of PyTorch's operators, kept from what a caller has set for those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def outside_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.autocast off: an operator computes in the dtypes that its contract says.

    An implementation with the trait ``plain_torch`` is wrapped when it is bound; others that call PyTorch's operators
    have this as a decorator.
    """
    import torch  # which such a function has imported: the runtime itself does without

    asked: Callable[[], bool] | None = getattr(torch._C, "_is_any_autocast_enabled", None)
    accelerator = torch.accelerator.current_accelerator()
    everywhere = _without("cpu", function)
    if accelerator is not None:
        everywhere = _without(accelerator.type, everywhere)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and asked is not None and not asked():
            return function(*args, **keywords)
        return everywhere(*args, **keywords)

    return call


def _without(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the autocast of one kind of device off."""
    import torch

    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.is_autocast_enabled(kind):
            return function(*args, **keywords)
        with torch.autocast(kind, enabled=False):
            return function(*args, **keywords)

    return call
