# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators whose calls are recorded and replayed: a call like an earlier one only allocates and launches.

``@replayed()`` is `te_dispatch.backend_kit.call_plans.planned` for host functions that launch their kernels themselves.
The first call of a signature runs the host function. The second runs it while a `Tape` records what it allocates and
launches, and later ones replay that with their own tensors. So a call that never comes again is not recorded, which
takes about a millisecond.

The host function must

- read nothing that changes but its arguments' signature, and settings through `tape.read`;
- launch with numbers that follow from these, and with tensors. An address may go into a number through
  `memory.address` alone.

`te_dispatch.backend_kit.caches.clear` is called when something else that it has read (configurations) changes.

A call that does more, such as a copy of an operand that is not contiguous, cannot be recorded: its host function runs
every time. So it does for calls that a recording does not serve: a tensor begins at no multiple of 16 bytes, or lies
where another does, a hook listens to launches, another device is current, or, on AMD, 32 bits do not reach all of a
tensor's memory. Such a call is not recorded either.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import CallPlans, Launch, compiled
from te_dispatch.backend_kit.device import dispatch_modes
from te_dispatch.ops import alloc
from te_dispatch_triton import launch
from te_dispatch_triton.kinds import AMD, in_reach
from te_dispatch_triton.tape import ACTIVE, Given, Tape

#: The index of the first device whose calls are recorded; the host's is -1.
_LEAST = 0
#: Tensors of a call that have variables of their own.
_FEW = 16


class _Met:
    """What is kept for a signature before its launches are recorded, and where they cannot be.

    Attributes:
        launch: the recording, for callers that have asked for a launch before there was one.
        failed: whether a call could not be recorded.
    """

    __slots__ = ("failed", "launch")

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.failed = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return NotImplemented if self.launch is None else self.launch(*tensors)


class Replays(CallPlans):
    """The recorded launches of one host function, by signature."""

    def work_out(self, *arguments: Any) -> Any:
        """Run the function, and record what it does in the second call of a signature."""
        self.misses += 1
        run = functools.partial(self.function, **dict(zip(self.kinds, arguments)))
        try:
            facts, tensors = self.signature(arguments)
        except TypeError:
            return run()
        if not _recordable(tensors):
            return run()
        found = self.launches(facts, tensors)
        if not found:
            result = run()
            self.keep(facts, tensors, _Met())
            return result
        met = next((one for one in found if isinstance(one, _Met)), None)
        if met is not None and met.failed:
            return run()
        tape = Tape([Given(x, p, value) for (x, p), value in zip(_names(len(tensors)), tensors)])
        with tape.recording():
            result = run()
        recorded = _replay(tape, tensors, self.function.__name__, result)
        if recorded is None:
            if met is None:  # there is a recording, which a changed setting or another allocator made refuse
                self.keep(facts, tensors, met := _Met(), unusual=True)
            met.failed = True
        else:
            if met is not None:
                met.launch = recorded
            self.keep(facts, tensors, recorded, instead=met)
        return result


replayed = Replays.planned


@contextmanager
def on_the_host() -> Iterator[None]:
    """Calls with tensors of the host are recorded, too: launches go elsewhere than to a device (`launch.diverted`)."""
    global _LEAST
    before = _LEAST, launch._raw_stream, launch._current
    _LEAST, launch._raw_stream, launch._current = -1, (lambda index: 0), (lambda: -1)
    try:
        yield
    finally:
        _LEAST, launch._raw_stream, launch._current = before


def _names(count: int) -> list[tuple[str, str]]:
    """Expressions for a call's tensors and their addresses."""
    if count <= _FEW:
        return [(f"x{i}", f"p{i}") for i in range(count)]
    return [(f"xs[{i}]", f"ps[{i}]") for i in range(count)]


def _replay(tape: Tape, tensors: Sequence[torch.Tensor], name: str, result: Any) -> Launch | None:
    """What the tape recorded as a function of the call's tensors, which returns NotImplemented where it does not serve;
    None where the call was not recorded."""
    source = tape.source(result)
    if source is None:
        return None
    settings, lines = source
    names = _names(len(tensors))
    if len(tensors) <= _FEW:
        xs = ", ".join(x for x, _ in names)
        before = [f"{p} = {x}.data_ptr()" for x, p in names]
        low = " | ".join(p for _, p in names)
    else:
        xs, before, low = "*xs", ["ps = [*map(data_ptr, xs)]"], "reduce(or_, ps)"
    reached = [f"not in_reach({x})" for x, _ in names] if AMD else []
    refused = [f"({low}) & 15", *settings, *reached, "ACTIVE", "host.observed()"]
    text = _REPLAY.format(
        given=", ".join(tape.names), name=name, xs=xs, before="\n        ".join(before), refused=" or ".join(refused),
        index=tensors[0].get_device(), lines="\n        ".join(lines),
    )  # fmt: skip
    return compiled(
        text, f"replay of {name}", host=launch, direct=alloc.direct, ACTIVE=ACTIVE, in_reach=in_reach, reduce=reduce,
        or_=or_, data_ptr=torch.Tensor.data_ptr, **tape.names,
    )  # fmt: skip


#: A tape sees what host functions do, that of an operator within another too.
_REPLAY = """
def make(host, direct, ACTIVE, in_reach, reduce, or_, data_ptr, {given}):
    def {name}({xs}):
        {before}
        empty, current = direct
        if empty is None:  # another allocator is in force: it is asked
            current = host._current
        if {refused} or (current is not None and current() != {index}):
            return NotImplemented
        stream = host._raw_stream({index})
        {lines}

    return {name}
"""


def _recordable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a recording would serve this call."""
    index = tensors[0].get_device() if tensors else _LEAST - 1
    if index < _LEAST or launch._current() != index or ACTIVE or launch.observed() or dispatch_modes():
        return False
    addresses = [x.data_ptr() for x in tensors if x.numel()]
    apart = len(set(addresses)) == len(addresses) and len(set(map(id, tensors))) == len(tensors)
    return apart and not any(at & 15 for at in addresses) and not (AMD and not all(map(in_reach, tensors)))
