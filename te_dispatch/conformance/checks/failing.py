# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls whose memory runs out: the error reaches the caller, nothing of the call stays, and the next one is right."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.transfer import tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.ops import alloc

#: Allocations of a call that fail, one after the other: the first ones, which are results' mostly.
_FIRST = 3


class _OutOfMemory(torch.OutOfMemoryError):
    """Raised by the kit in place of an allocation."""


@contextmanager
def _failing(number: int) -> Iterator[list[str]]:
    """A block in which the allocation of that number fails; what was asked for until then, by role."""
    asked: list[str] = []

    def allocate(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(role)
        if len(asked) == number:
            raise _OutOfMemory(f"no memory for {role} {shape}")
        return torch.empty(shape, dtype=dtype, device=device)

    previous = alloc.set_allocator(allocate)
    try:
        yield asked
    finally:
        alloc.set_allocator(previous)


def out_of_memory(trial: Trial) -> None:
    """A call whose first, second or third allocation fails, and the same call again with memory."""
    trial.claim(trial.on_device())
    for number in range(1, _FIRST + 1):
        if not _fails(trial, number):
            break
        arguments = trial.on_device()
        result = trial.call(arguments)
        synchronize(trial)
        try:
            trial.judge(result, arguments)
        except Failure as failure:
            raise Failure(f"after a call for which there was no memory: {failure}", failure.findings) from failure


def _fails(trial: Trial, number: int) -> bool:
    """Make a call whose allocation of that number fails; False where it makes no such."""
    arguments = trial.on_device()
    operands = [(path, weakref.ref(x)) for path, x in tensors(dict(arguments))]
    with _failing(number) as asked:
        try:
            trial.call(arguments)
        except _OutOfMemory:
            pass
        else:
            if len(asked) >= number:
                raise Failure(f"no memory for {asked[number - 1]}, and the caller was not told")
            return False
    synchronize(trial)
    del arguments
    held = [path for path, operand in operands if operand() is not None]
    if held:
        gc.collect()  # an error's traceback may be part of a cycle
        held = [path for path, operand in operands if operand() is not None]
    if held:
        raise Failure(f"{held[0]} is kept alive after a call for which there was no memory")
    return True


CHECKS = (
    Check("out_of_memory", out_of_memory, anywhere, 0, 1, "a call for which there is no memory, and the next one"),
)
