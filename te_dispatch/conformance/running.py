# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running many units: here or in workers, one outcome at a time, as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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


def run(units: Sequence[Unit], settings: Settings) -> Iterator[Outcome]:
    """Run units and yield outcomes as they come: in order where there is one worker or none.

    Raises:
        WorkerError, OracleError, ValueError: the kit cannot go on; what the subjects do never raises.
    """
    if not settings.isolated:
        bench = bench_of(settings)
        for unit in units:
            yield run_unit(unit, bench)
        return
    yield from _in_workers(units, settings)


def _in_workers(units: Sequence[Unit], settings: Settings) -> Iterator[Outcome]:
    jobs = max(1, min(settings.jobs, len(units)))
    waiting: SimpleQueue[Sequence[Unit] | None] = SimpleQueue()
    for stretch in (*stretches(units, jobs), *[None] * jobs):
        waiting.put(stretch)
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


def stretches(units: Sequence[Unit], jobs: int) -> list[Sequence[Unit]]:
    """All units in their order, cut so that workers share them out. Neighbours share an oracle's result."""
    count = min(len(units), jobs * _STRETCHES if jobs > 1 else 1)
    return [units[len(units) * i // count : len(units) * (i + 1) // count] for i in range(count)]


def _work(
    waiting: SimpleQueue[Sequence[Unit] | None],
    settings: Settings,
    put: Callable[[Union[Outcome, BaseException, None]], None],
    stopping: threading.Event,
) -> None:
    worker = Worker(settings)
    try:
        while (stretch := waiting.get()) is not None:
            for unit in stretch:
                if stopping.is_set():
                    return
                put(worker.run(unit))
    except BaseException as error:  # handed to the thread that reads outcomes
        put(error)
    finally:
        worker.stop()
        put(None)
