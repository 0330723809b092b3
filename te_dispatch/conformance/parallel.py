# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calling a function of the kit for many arguments in several worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.conformance.isolation import Worker
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes
from te_dispatch.core.manager import OpManager

T = TypeVar("T")


def mapped(
    function: Callable[..., T], arguments: Sequence[tuple[Any, ...]], manager: OpManager, settings: Settings
) -> Iterator[T]:
    """``function(manager, settings, *one)`` for each of the arguments, in their order.

    Args:
        function: of a module, so that a worker finds it by its name.
        arguments: and results can be pickled.
        manager: where it is not the process's own, which is what workers have, everything is called here.
        settings: whose ``jobs`` is the number of workers; with one job everything is called here.

    Raises:
        WorkerError: a worker cannot start or died, or the function raised in one.
    """
    jobs = min(settings.jobs, len(arguments))
    if jobs < 2 or not settings.isolated or manager is not scopes.MANAGER:
        yield from (function(manager, settings, *one) for one in arguments)
        return
    workers = [Worker(settings) for _ in range(jobs)]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def call(one: tuple[Any, ...]) -> T:
        worker = idle.get()
        try:
            result: T = worker.call(function, *one)
        finally:
            idle.put(worker)
        return result

    pool = ThreadPoolExecutor(jobs)
    try:
        yield from pool.map(call, arguments)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()
