# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Functions that a recorded call repeats as one step: those with an effect that the recorder cannot see.

How calls are recorded: `te_dispatch.pytorch.capture`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from te_dispatch.core import scopes

Function = TypeVar("Function", bound=Callable[..., Any])


class Recorder(Protocol):
    """What records calls in this thread: `te_dispatch.pytorch.capture.recorder.Recorder`."""

    scope: Any

    def make(self, target: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any: ...


class _Thread(threading.local):
    recorder: Recorder | None = None


thread = _Thread()


def step(function: Function) -> Function:
    """Mark a function as one step: its calls are recorded and repeated as they are, and not looked into.

    What it returns follows from its arguments, or is drawn anew in every call. An argument that is neither a tensor nor
    a constant is taken to be the same object in every call.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or thread.recorder is None:
            return function(*args)
        with scopes.reenter(thread.recorder.scope):  # which it may keep
            return thread.recorder.make(function, args, function)

    return call  # type: ignore[return-value]
