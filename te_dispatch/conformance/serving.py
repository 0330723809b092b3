# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a worker process of `te_dispatch.conformance.isolation` runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.emulated import device_entered
from te_dispatch.conformance.execute import Bench, run_unit
from te_dispatch.conformance.isolation import become_worker
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes


def main(descriptor: int) -> None:
    """What a worker process runs: settings come first, then unit ids, or functions with their arguments.

    Args:
        descriptor: of the inherited end of the pipe.
    """
    become_worker()
    pipe = Connection(descriptor)
    serve(pipe, pipe.recv())


def serve(pipe: Connection, settings: Settings) -> None:
    """Build a bench, then answer unit ids with outcomes, and functions with what they return, until the other end
    closes."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(device_entered(scopes.MANAGER, settings))
            bench = bench_of(settings)
        except Exception as error:  # reported by the parent, which knows how
            pipe.send(("error", f"{type(error).__name__}: {error}"))
            return
        pipe.send(("ready", None))
        _answer(pipe, settings, bench)


def _answer(pipe: Connection, settings: Settings, bench: Bench) -> None:
    for request in _requests(pipe):
        answer: tuple[str, Any]
        try:
            if isinstance(request, str):
                outcome = run_unit(Unit.parse(request), bench)
                usable = outcome.state != "failed" or bench.usable()
                answer = ("outcome" if usable else "last", outcome.as_data())
            else:
                function, arguments = request
                answer = ("result", function(bench.manager, settings, *arguments))
        except Exception as error:  # of the kit itself: the run cannot go on
            name = request if isinstance(request, str) else request[0].__name__
            answer = ("error", f"{name}: {type(error).__name__}: {error}")
        # What this unit printed must not come to stand behind the next one's.
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(answer)


def _requests(pipe: Connection) -> Iterator[Any]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
