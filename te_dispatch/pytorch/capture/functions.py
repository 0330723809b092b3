# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`replayed`: an autograd Function whose calls are recorded, and repeated, where its options ask for it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from te_dispatch.pytorch.capture.program import Program, record_forward

Function = TypeVar("Function", bound="type[torch.autograd.Function]")


class Replayable:
    """Base of a Function's options.

    Attributes:
        program: of calls with these options; None where there is none.
        capture: takes a copy of these options with the program that was made of the call, or with None, from the first
            call that has them; None where nobody asks.
    """

    __slots__ = ("program", "capture")

    def __init__(self) -> None:
        self.program: Program | None = None
        self.capture: Callable[[Any], None] | None = None

    def with_program(self, program: Program | None) -> Any:
        """These options for all calls of a signature."""
        found = copy.copy(self)
        found.program, found.capture = program, None
        return found


def replayed(
    around: Callable[[Callable[..., Any]], Callable[..., Any]], options: str = "options"
) -> Callable[[Function], Function]:
    """A decorator of autograd Functions, whose calls it captures and replays where their options ask for it.

    The Function's forward is (ctx, tensors.., options, *others), where tensors may be None and the options are a
    `Replayable`, and sets ``ctx.scope``.

    Args:
        around: goes around the backward, replayed or not (`te_dispatch.pytorch.autograd.scoped`).
        options: the name of that parameter.
    """

    def decorate(function: Function) -> Function:
        forward, backward = function.forward, function.backward
        parameters = list(inspect.signature(forward).parameters)
        at = parameters.index(options) - 1
        names = tuple(parameters[1 : at + 1])

        def run(ctx: Any, *args: Any) -> Any:
            given: Replayable = args[at]
            program = given.program
            if program is not None and program.needs == ctx.needs_input_grad:
                ctx.program, ctx.scope = program, program.scope
                return program.forward(ctx, *args[:at])
            ctx.program = None
            capture = given.capture
            if capture is None:
                return forward(ctx, *args)
            given.capture = None  # the graph that keeps the options must not keep the module
            result, program = record_forward(forward, backward, names, ctx, args)
            capture(given.with_program(program))
            ctx.program = program
            return result

        def run_backward(ctx: Any, *grads: Any) -> Any:
            program: Program | None = ctx.program
            return backward(ctx, *grads) if program is None else program.backward(ctx, *grads)

        function.forward = staticmethod(run)  # type: ignore[assignment]
        function.backward = staticmethod(around(run_backward))  # type: ignore[assignment]
        return function

    return decorate
