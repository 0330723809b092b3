# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls beside other work: from several threads at once, and on a stream that is not the default one."""

from __future__ import annotations

import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.sizes import enlarged, varied
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.memory import same_bits
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved, overwrite
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.torch_private import sleep

#: As many as the cases that they call on.
THREADS = 4
#: Threads that PyTorch's operations on the CPU are given: one beside a power of two divides no work evenly.
COUNTS = (2, 7, 17)
#: Times that all threads start together, and calls of each every time.
ROUNDS, CALLS = 3, 4
#: Owners of functions during which nothing is computed.
_QUICK = (type(None), type(sys), str, bytes, list, tuple, dict, set, frozenset, int)
#: Rows of the case that one of the threads calls on.
_ROWS = 120
#: Rows of the case that no call had before, at least: odd, as no other check's are. How many there are to choose from.
_FIRST_ROWS, _FIRST_SIZES = 131, 50
#: Seconds between two switches of Python's threads meanwhile: so short that each call is interrupted.
_SWITCH_S = 1e-6
#: Seconds after which no further round starts: interpreted kernels take seconds a call.
_BUDGET_S = 15.0
#: Clock cycles that a stream is held up before operands are written on it: some 50 ms.
_DELAY = 100_000_000


def thread_counts(trial: Trial) -> None:
    """A call is right with every number of threads of the CPU, on the case, on more rows, and on fewer than threads."""
    others = (enlarged(trial, _ROWS), enlarged(trial, 1))
    for one in (trial, *(other for other in others if other is not None)):
        for count in COUNTS:
            arguments = one.on_device()
            one.claim(arguments)
            with thread_count(count):
                result = one.call(arguments)
            try:
                one.judge(result, arguments)
            except Failure as failure:
                raise Failure(f"with {count} threads of the CPU: {failure}", failure.findings) from failure


def threads(trial: Trial) -> None:
    """Several threads call at once, each with data of its own, one with more rows and half of them with other options;
    each gets its own results. Where a backward reads what its forward saved, forwards and backwards run at once. What
    is wrong without other threads is told as that."""
    trial.claim(trial.on_device())
    # One thread of the CPU for each: several of each would wait for one another most of the time.
    with thread_count(1):
        _race_to_be_first(trial)
        _race(trial)


def _race_to_be_first(trial: Trial) -> None:
    """Calls of one size that no call had before: what an implementation makes for a size must be whole when it is
    found."""
    rows = _FIRST_ROWS + 2 * (zlib.crc32(str(trial.case).encode()) % _FIRST_SIZES)
    other = enlarged(trial, rows, sure=False)
    if other is None:
        return
    together = Barrier(THREADS)
    given = [other.with_seed(trial.case.seed * THREADS + i) for i in range(THREADS)]

    def first(one: Trial) -> tuple[Any, Arguments]:
        arguments = one.on_device()
        together.wait(60)
        # Past `Trial.call`, which would take what another thread changes for the time of a compilation, say, for what
        # this one left behind. The unit as a whole must leave everything as it was.
        result = one.subject.call(arguments)
        synchronize(one)
        return result, arguments

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(first, given))
    except (NotClaimed, Declined):
        return
    for one, (result, arguments) in zip(given, results, strict=True):
        try:
            one.judge(result, arguments)
        except Failure as failure:
            _Work(one)  # raises what is wrong without other threads
            raise Failure(
                f"with {THREADS} threads at once: in the first calls of a size: {failure}", failure.findings
            ) from failure


def _race(trial: Trial) -> None:
    other = varied(trial) or trial
    cases = (trial, enlarged(trial, _ROWS) or trial, other, other)
    works = [_Work(case.with_seed(trial.case.seed * THREADS + i)) for i, case in enumerate(cases)]
    until = time.monotonic() + _BUDGET_S
    interval = sys.getswitchinterval()
    for number in range(ROUNDS):
        together = Barrier(THREADS)
        interrupted = number % 2 == 0
        sys.setswitchinterval(interval if interrupted else _SWITCH_S)
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                rounds = list(pool.map(_Work.run, works, [together] * THREADS, [interrupted] * THREADS))
        finally:
            sys.setswitchinterval(interval)
        wrong = [message for work, results in zip(works, rounds) for message in work.wrong(results)]
        if wrong:
            more = f" ({len(wrong)} of {THREADS * CALLS} calls)" if wrong[1:] else ""
            raise Failure(f"with {THREADS} threads at once: {wrong[0]}{more}")
        if time.monotonic() > until:
            return


def _hand_over(frame: Any, event: str, argument: Any) -> None:
    if event in ("c_call", "c_return") and type(getattr(argument, "__self__", None)) not in _QUICK:
        time.sleep(0)


class _Work:
    """What one thread calls, with the results of a call alone.

    Raises:
        Failure: these are wrong.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial, self._single = trial, False
        self._given = moved(trial.arguments(), trial.device)
        (result, arguments) = self._call(moved(self._given, trial.device))
        synchronize(trial)
        trial.judge(result, arguments)
        self._alone = {path: tensor.clone() for path, tensor in trial.results(result, arguments).items()}

    def _call(self, given: Arguments) -> tuple[Any, Arguments]:
        arguments = self._trial.with_forward(given)
        return self._trial.call(arguments), arguments

    def run(self, together: Barrier, interrupted: bool) -> list[tuple[Any, Arguments]]:
        """Call when all threads are ready.

        Args:
            together: of all threads.
            interrupted: hand over to another thread before and after each operation that Python calls.
        """
        sets = [moved(self._given, self._trial.device) for _ in range(CALLS)]
        together.wait(60)
        self._single = torch.get_num_threads() == 1
        before = sys.getprofile()
        try:
            sys.setprofile(_hand_over if interrupted else before)
            results = [self._call(given) for given in sets]
        finally:
            sys.setprofile(before)
        synchronize(self._trial)
        return results

    def wrong(self, results: list[tuple[Any, Arguments]]) -> list[str]:
        """What is wrong with results, in words. Those with the bits of the call alone need no judgement."""
        found = []
        for result, arguments in results:
            named = self._trial.results(result, arguments)
            if all(path in named and same_bits(tensor, named[path]) for path, tensor in self._alone.items()):
                continue
            try:
                self._trial.judge(result, arguments)
            except Failure as failure:
                found.append(str(failure))
                continue
            if self._single and "deterministic" in self._trial.subject.claims:
                found.append("results have other bits than those of a call alone, and it claims to be deterministic")
        return found


def stream(trial: Trial) -> None:
    """On a stream of its own, behind work that writes its operands late: the call must wait for that work."""
    fresh = moved(trial.arguments(), trial.device)
    trial.claim(trial.with_forward(fresh))
    late = mapped(moved(fresh, trial.device), torch.zero_)
    side = torch.cuda.Stream(trial.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(trial.device))
    try:
        with torch.cuda.stream(side):
            assert sleep is not None  # `_on_streams`
            sleep(_DELAY)
            overwrite(late, fresh)
            arguments = trial.with_forward(late)
            result = trial.call(arguments)
    finally:
        # Also where the call declined: what is still to be written late must not land in somebody else's memory.
        synchronize(trial)
    trial.judge(result, arguments)


def _on_streams(subject: Subject, space: Space) -> str | None:
    if subject.device.type != "cuda":
        return f"{subject.device.type} has no streams"
    return None if sleep is not None else "this PyTorch cannot keep a stream busy"


def _on_the_cpu(subject: Subject, space: Space) -> str | None:
    return None if subject.device.type == "cpu" else f"calls on {subject.device.type} do not share work among threads"


def _in_threads(subject: Subject, space: Space) -> str | None:
    return "an emulator executes one launch after the other" if subject.emulated else None


CHECKS = (
    Check("thread_counts", thread_counts, _on_the_cpu, 0, 2, "calls with several threads of the CPU"),
    Check("threads", threads, _in_threads, 1, 2, "calls from several threads at once"),
    Check("stream", stream, _on_streams, 1, 2, "work on a stream other than the default"),
)
