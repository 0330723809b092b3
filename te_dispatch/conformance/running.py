# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running many units: here or in workers, one outcome at a time, as they come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Union

from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.execute import run_unit
from te_dispatch.conformance.isolation import Worker
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.settings import Settings

#: Stretches of units for each worker. Some operators' units take a hundred times as long as others': who is done with
#: one stretch takes another.
_STRETCHES = 8
#: Units that a worker takes at a time where nobody knows how many there are.
_STREAMED = 32


def run(units: Iterable[Unit], settings: Settings) -> Iterator[Outcome]:
    """Run units and yield outcomes as they come: in order where there is one worker or none.

    Args:
        units: taken as they are needed, so that there may be more of them than memory holds.
        settings: of the run.

    Raises:
        WorkerError, OracleError, ValueError: the kit cannot go on; what the subjects do never raises.
    """
    if not settings.isolated:
        bench = bench_of(settings)
        for unit in units:
            yield run_unit(unit, bench)
        return
    yield from _in_workers(units, settings)


class _Shared:
    """Stretches of units that several threads take in turn."""

    def __init__(self, stretches: Iterator[Sequence[Unit]]) -> None:
        self._stretches = stretches
        self._lock = threading.Lock()

    def take(self) -> Sequence[Unit] | None:
        with self._lock:
            return next(self._stretches, None)


def _in_workers(units: Iterable[Unit], settings: Settings) -> Iterator[Outcome]:
    jobs = settings.jobs
    if isinstance(units, Sequence):
        jobs = max(1, min(jobs, len(units)))
        waiting = _Shared(iter(stretches(units, jobs)))
    else:
        waiting = _Shared(_streamed(units))
    done: SimpleQueue[Union[Outcome, BaseException, None]] = SimpleQueue()
    stopping = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(waiting, settings, done.put, stopping), daemon=True) for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    try:
        running = jobs
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _streamed(units: Iterable[Unit]) -> Iterator[Sequence[Unit]]:
    left = iter(units)
    while stretch := list(itertools.islice(left, _STREAMED)):
        yield stretch


def stretches(units: Sequence[Unit], jobs: int) -> list[Sequence[Unit]]:
    """All units in their order, cut so that workers share them out. Neighbours share an oracle's result."""
    count = min(len(units), jobs * _STRETCHES if jobs > 1 else 1)
    return [units[len(units) * i // count : len(units) * (i + 1) // count] for i in range(count)]


def _work(
    waiting: _Shared,
    settings: Settings,
    put: Callable[[Union[Outcome, BaseException, None]], None],
    stopping: threading.Event,
) -> None:
    worker = Worker(settings)
    try:
        while (stretch := waiting.take()) is not None:
            for unit in stretch:
                if stopping.is_set():
                    return
                put(worker.run(unit))
    except BaseException as error:  # handed to the thread that reads outcomes
        put(error)
    finally:
        worker.stop()
        put(None)
