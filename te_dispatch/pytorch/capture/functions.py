# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`replayed`: an autograd Function whose calls are recorded, and repeated, where its options ask for it.

`replayed_inference`: the same of a function that is called where nobody wants gradients.
"""

from __future__ import annotations

import copy
import functools
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
    `Replayable`, and sets ``ctx.scope``. Forward and backward, as they are written, stay the Function's `plain`.

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

        function.plain = forward, around(backward)  # type: ignore[attr-defined]
        function.forward = staticmethod(run)  # type: ignore[assignment]
        function.backward = staticmethod(around(run_backward))  # type: ignore[assignment]
        return function

    return decorate


class _NoContext:
    """Stands for a Function's context where there is no graph."""

    needs_input_grad = ()


_NO_CONTEXT = _NoContext()


def replayed_inference(function: Callable[..., Any], options: str = "options") -> Callable[..., Any]:
    """A function of (tensors.., options), with its calls captured and replayed where their options ask for it.

    Args:
        function: it is called where no gradients are wanted, and not under a Function.
        options: the name of its last parameter, a `Replayable`.
    """
    *names, last = inspect.signature(function).parameters
    assert last == options

    def plain(ctx: Any, *args: Any) -> Any:
        return function(*args)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        given: Replayable = args[-1]
        if given.program is not None:
            return given.program.forward(_NO_CONTEXT, *args[:-1])
        capture = given.capture
        if capture is None:
            return function(*args)
        given.capture = None
        result, program = record_forward(plain, _no_backward, names, _NO_CONTEXT, args)
        capture(given.with_program(program))
        return result

    return run


def _no_backward(ctx: Any, *grads: Any) -> Any:
    raise AssertionError("a call without gradients has no backward")
