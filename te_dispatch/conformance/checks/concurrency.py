# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls beside other work: from several threads at once, and on a stream that is not the default one."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from te_dispatch.conformance.checks import Check, anywhere, register
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved, overwrite
from te_dispatch.conformance.trial import Failure, Trial

THREADS = 4
CALLS = 3
#: Clock cycles that a stream is held up before operands are written on it: some 50 ms.
_DELAY = 100_000_000


def threads(trial: Trial) -> None:
    """Several threads call at once, each with data of its own, and each gets its own results."""
    trial.claim(trial.on_device())
    together = Barrier(THREADS)

    def work(number: int) -> list[str]:
        case = dataclasses.replace(trial.case, seed=trial.case.seed * THREADS + number)
        own = Trial(trial.subject, case, trial.oracle, trial.space)
        sets = [own.on_device() for _ in range(CALLS)]
        together.wait(60)
        results = [own.call(arguments) for arguments in sets]
        synchronize(own)
        wrong = []
        for result, arguments in zip(results, sets):
            try:
                own.judge(result, arguments)
            except Failure as failure:
                wrong.append(str(failure))
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [message for found in pool.map(work, range(THREADS)) for message in found]
    if wrong:
        raise Failure(f"with {THREADS} threads at once: {wrong[0]}" + (f" ({len(wrong)} calls)" if wrong[1:] else ""))


def stream(trial: Trial) -> None:
    """On a stream of its own, behind work that writes its operands late: the call must wait for that work."""
    fresh = moved(trial.arguments(), trial.device)
    trial.claim(trial.with_forward(fresh))
    late = mapped(moved(fresh, trial.device), torch.zero_)
    side = torch.cuda.Stream(trial.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(trial.device))
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(_DELAY)  # type: ignore[no-untyped-call]
            overwrite(late, fresh)
            arguments = trial.with_forward(late)
            result = trial.call(arguments)
    finally:
        # Also where the call declined: what is still to be written late must not land in somebody else's memory.
        synchronize(trial)
    trial.judge(result, arguments)


def _on_streams(subject: Subject, space: Space) -> str | None:
    return None if subject.device.type == "cuda" else f"{subject.device.type} has no streams"


register(
    Check("threads", threads, anywhere, 1, 2, "calls from several threads at once"),
    Check("stream", stream, _on_streams, 1, 2, "work on a stream other than the default"),
)
