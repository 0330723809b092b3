# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is called instead of a captured callable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.graphs.captured import Captured

_MICROBATCH = "is_first_microbatch"


def graphed(function: Callable[..., Any], captured: Captured, caches: bool) -> Callable[..., Any]:
    """A function that replays a captured call of `function` where the call is one that was captured.

    It calls `function` itself, of a module the forward, where the module is in the other training mode; where gradients
    are wanted and were not captured; without gradients under delayed scaling, because such a call must record no
    amaxes, and the graph records them; and as a part of something that is being captured.

    Args:
        caches: whether calls say by ``is_first_microbatch`` when weights are quantized.
    """
    module = function if isinstance(function, torch.nn.Module) else None
    eager = function if module is None else module.forward
    training = module is not None and module.training
    owner, signature = captured.signature.owner, captured.signature
    delayed = bool(captured.scaled)

    def calls_itself() -> bool:
        records = torch.is_grad_enabled()
        if thread.recording is not None or (records and not captured.trains):
            return True
        if module is not None and module.training is not training:
            return True
        if delayed:
            captured.refuse_checkpoints()
        return delayed and not records

    @functools.wraps(eager)
    def call(*args: Any, **kwargs: Any) -> Any:
        if calls_itself():
            if not signature.takes_microbatch:
                kwargs.pop(_MICROBATCH, None)
            return eager(*args, **kwargs)
        first = kwargs.pop(_MICROBATCH, None) if kwargs else None
        if caches:
            if not isinstance(first, bool):
                raise TypeError(
                    f"{owner} was captured with cache_quantized_params=True: every call needs is_first_microbatch=True "
                    f"or False, got {first!r}"
                )
        elif first is False and delayed:
            raise ValueError(
                f"{owner} was captured to quantize its weights in every call: is_first_microbatch=False needs "
                "cache_quantized_params=True"
            )
        return captured.run(args, kwargs, first)

    call.is_graphed, call.reset = True, captured.reset  # type: ignore[attr-defined]
    return call
