# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""In which order calls are captured: that in which they will run, because all graphs share one pool of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_dispatch.pytorch.graphs.settings import NAME


class Step(NamedTuple):
    """One pass of one call: its forward, or its backward."""

    call: int
    forward: bool


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    owners: by call, which callable it is a call of. Each call has sample arguments and graphs of its own.
    steps: each call's forward, and its backward later.
    pipelined: whether callables may have several calls.
    """

    owners: tuple[int, ...]
    steps: tuple[Step, ...]
    pipelined: bool

    def forwards(self) -> list[int]:
        """The calls in the order of their forwards."""
        return [step.call for step in self.steps if step.forward]


def one_after_the_other(callables: int) -> Schedule:
    """One call of each callable, then the backward passes in reverse."""
    calls = range(callables)
    steps = [*(Step(call, True) for call in calls), *(Step(call, False) for call in reversed(calls))]
    return Schedule(tuple(calls), tuple(steps), False)


def pipeline(order: Any, layers_per_chunk: Any, callables: int) -> Schedule:
    """Calls of a pipeline-parallel rank.

    Args:
        order: chunk numbers from 1: c for the forward of chunk c's next microbatch, -c for its next backward.
        layers_per_chunk: how many of the callables each chunk consists of, in order; None for equal parts.
        callables: how many there are.

    Returns:
        Its calls are numbered by chunk, in it by microbatch, in that by layer.

    Raises:
        ValueError: an order that is none; TypeError: entries that are no integers.
    """
    _check_entries(order)
    chunks = max(map(abs, order))
    microbatches = _microbatches(order, chunks)
    layers = _layers(layers_per_chunk, chunks, callables)
    first = [sum(layers[:chunk]) for chunk in range(chunks)]
    owners = [
        first[chunk] + layer for chunk in range(chunks) for _ in range(microbatches) for layer in range(layers[chunk])
    ]
    steps: list[Step] = []
    forwards, backwards = [0] * chunks, [0] * chunks
    for entry in order:
        chunk, forward = abs(entry) - 1, entry > 0
        done = forwards if forward else backwards
        start = first[chunk] * microbatches + done[chunk] * layers[chunk]
        done[chunk] += 1
        calls = range(start, start + layers[chunk])
        steps += [Step(call, forward) for call in (calls if forward else reversed(calls))]
    return Schedule(tuple(owners), tuple(steps), True)


def _check_entries(order: Any) -> None:
    if not isinstance(order, (list, tuple)) or not order:
        raise TypeError(f"{NAME}: _order must be a list of chunk numbers, got {order!r}")
    for entry in order:
        if isinstance(entry, float) and not entry.is_integer():
            raise NotImplementedError(
                f"{NAME}: _order with passes for weight gradients alone ({entry!r}) is not supported yet, only integers"
            )
        if isinstance(entry, bool) or not isinstance(entry, int) or not entry:
            raise TypeError(f"{NAME}: _order must consist of integers other than 0, got {entry!r}")


def _microbatches(order: Sequence[int], chunks: int) -> int:
    """How many microbatches there are, the same for all chunks.

    Raises:
        ValueError: chunks differ, or a backward comes before its forward.
    """
    microbatches = order.count(1)
    for chunk in range(1, chunks + 1):
        counts = order.count(chunk), order.count(-chunk)
        if counts != (microbatches, microbatches) or not microbatches:
            raise ValueError(
                f"{NAME}: _order must have as many forwards as backwards, the same number for each of its {chunks} "
                f"chunks; chunk {chunk} has {counts[0]} forwards and {counts[1]} backwards, chunk 1 has "
                f"{microbatches} forwards"
            )
        pending = 0
        for entry in order:
            pending += (entry == chunk) - (entry == -chunk)
            if pending < 0:
                raise ValueError(f"{NAME}: _order has a backward of chunk {chunk} before its forward: {list(order)}")
    return microbatches


def _layers(layers_per_chunk: Any, chunks: int, callables: int) -> list[int]:
    if layers_per_chunk is None:
        if callables % chunks:
            raise ValueError(
                f"{NAME}: {callables} callables cannot be divided among the {chunks} chunks of _order equally; pass "
                "_num_layers_per_chunk"
            )
        return [callables // chunks] * chunks
    layers = list(layers_per_chunk)
    if len(layers) != chunks or sum(layers) != callables or min(layers) < 0:
        raise ValueError(
            f"{NAME}: _num_layers_per_chunk must have an entry for each of the {chunks} chunks of _order, and their "
            f"sum must be the number of callables, {callables}; got {layers}"
        )
    return layers
