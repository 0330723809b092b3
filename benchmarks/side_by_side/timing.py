# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Clocks: how long calls take on the device, and how long the host is busy with them.

Rivals are timed in interleaved rounds, so that a clock or a temperature that drifts meets all of them alike, and the
figure is the median over the rounds. On a GPU a round is one replay of a CUDA graph: what lies between two launches
is no kernel's fault. Where a call cannot be captured, its launches are queued behind a long sleep instead, which hides
the host just as well as long as it sleeps long enough.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]
Scope = Callable[[], AbstractContextManager[Any]]

#: A round should last so long, so that what a replay itself costs vanishes.
ROUND_US = 1500.0
#: Cycles that the device sleeps for each call which is queued meanwhile; about 100 us at 1.7 GHz.
SLEEP_CYCLES = 170_000


class Entrant:
    """One rival's calls on a row: equal work on different memory, so that no cache holds the next call's inputs."""

    def __init__(self, name: str, calls: Sequence[Call], scope: Scope = contextlib.nullcontext) -> None:
        self.name = name
        self.calls = list(calls)
        self.scope = scope
        self.method = ""
        #: Whatever must outlive the timing: results of a captured call stay where the graph writes them.
        self.kept: list[Any] = []


@dataclass
class Times:
    """Microseconds a call, one entry a round."""

    rounds: list[float] = field(default_factory=list)
    method: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(third quartile - first) / median."""
        if len(self.rounds) < 4:
            return 0.0
        first, _, third = statistics.quantiles(self.rounds, n=4)
        return (third - first) / self.median if self.median else 0.0


def device_times(entrants: Sequence[Entrant], rounds: int, device: torch.device) -> dict[str, Times | str]:
    """Times of each entrant on the device; a string says why one has none."""
    clock = _replay_clock if device.type == "cuda" else _host_clock
    times: dict[str, Times | str] = {}
    racers: list[tuple[Entrant, Callable[[], float]]] = []
    for entrant in entrants:
        try:
            racers.append((entrant, clock(entrant)))
            times[entrant.name] = Times(method=entrant.method)
        except Exception as error:
            times[entrant.name] = why(error)
    for number in range(rounds):
        for entrant, lap in _rotated(racers, number):
            times[entrant.name].rounds.append(lap())  # type: ignore[union-attr]
    return times


def host_times(entrants: Sequence[Entrant], rounds: int, calls: int, device: torch.device) -> dict[str, Times | str]:
    """Host time of calls that nothing waits for; give it calls so small that the device keeps up."""
    times: dict[str, Times | str] = {}
    racers = []
    for entrant in entrants:
        try:
            with entrant.scope():
                for _ in range(20):
                    entrant.calls[0]()
            synchronize(device)
            racers.append((entrant, entrant.calls[0]))
            times[entrant.name] = Times(method="host")
        except Exception as error:
            times[entrant.name] = why(error)
    with no_collection():
        for number in range(rounds):
            for entrant, call in _rotated(racers, number):
                with entrant.scope():
                    start = time.perf_counter_ns()
                    for _ in range(calls):
                        call()
                    spent = time.perf_counter_ns() - start
                synchronize(device)
                times[entrant.name].rounds.append(spent / calls / 1e3)  # type: ignore[union-attr]
    return times


def why(error: BaseException, width: int = 200) -> str:
    """An error in one line: its class, and what its message says first."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:width]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def no_collection() -> Any:
    """No garbage collection meanwhile: it would hit whoever's turn it is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rotated(racers: list[Any], number: int) -> list[Any]:
    start = number % len(racers) if racers else 0
    return racers[start:] + racers[:start]


def _run_all(entrant: Entrant, repeats: int) -> None:
    """Every call `repeats` times. Each result lives until its successor exists, so that outputs rotate too."""
    kept = entrant.kept or [None] * len(entrant.calls)
    entrant.kept = kept
    for _ in range(repeats):
        for i, call in enumerate(entrant.calls):
            kept[i] = call()


def _replay_clock(entrant: Entrant) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), entrant.scope():
        for _ in range(2):
            _run_all(entrant, 1)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    try:
        graph = _captured(entrant, 1)
        entrant.method = "graph"
    except Exception:
        torch.cuda.synchronize()
        entrant.kept = []
        entrant.method = "events"
        return _queue_clock(entrant)
    once = _timed(graph.replay)
    once = min(once, _timed(graph.replay))
    repeats = max(1, round(ROUND_US / max(once, 1.0)))
    if repeats > 1:
        graph = _captured(entrant, repeats)
    _timed(graph.replay)
    count = repeats * len(entrant.calls)
    return lambda: _timed(graph.replay) / count


def _captured(entrant: Entrant, repeats: int) -> torch.cuda.CUDAGraph:
    entrant.kept = []
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Not torch.cuda.graph: it gives all unused memory back first, which takes longer than what is measured.
    with no_collection(), torch.cuda.stream(torch.cuda.Stream()), entrant.scope():
        graph.capture_begin()
        try:
            _run_all(entrant, repeats)
        finally:
            graph.capture_end()
    return graph


def _queue_clock(entrant: Entrant) -> Callable[[], float]:
    def work() -> None:
        with entrant.scope():
            _run_all(entrant, repeats)

    repeats = 1
    start = time.perf_counter_ns()
    work()
    queueing_us = (time.perf_counter_ns() - start) / 1e3
    repeats = max(1, min(20, round(ROUND_US / max(_timed(work), 1.0))))
    cycles = round(SLEEP_CYCLES * (1 + repeats * queueing_us / 100))

    def lap() -> float:
        torch.cuda._sleep(cycles)
        return _timed(work) / (repeats * len(entrant.calls))

    lap()
    return lap


def _timed(work: Call) -> float:
    """Microseconds of the device between the work's first launch and its last."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _host_clock(entrant: Entrant) -> Callable[[], float]:
    entrant.method = "host"

    def lap() -> float:
        with entrant.scope():
            start = time.perf_counter_ns()
            _run_all(entrant, 1)
            return (time.perf_counter_ns() - start) / 1e3 / len(entrant.calls)

    lap()
    return lap
