# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which of several ways to make a call is the fastest on this machine: timed ahead, by ``te-dispatch tune``.

A backend's module ``tuning`` has `OPERATORS`, `cache_file` and `tune`, which the command asks for. Its `tune` gives
`tune` here what there is to time; what wins is written to a file of `te_dispatch.core.tuning_cache`, where calls look
it up when they are planned. Calls never tune.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.core.tuning_cache import Entry

#: Operands take turns, so that together they exceed any chip's level-2 cache, as in training.
ROTATED_BYTES = 256 << 20
#: Times that differ by less are equal: the earlier candidate is taken, on every machine.
EQUAL = 0.01
#: Rounds of timing, and microseconds of one candidate's part of a round.
ROUNDS, PART_US = 7, 400.0

Row = dict[str, Any]
#: Called after each call was tuned, with its index and its row.
Done = Callable[[int, Mapping[str, Any]], None]


class Candidate(NamedTuple):
    """One way to make a call.

    Attributes:
        entry: what the cache holds of it if it is the fastest. words: a description for people.
        run: makes the call several times on the device, and returns the microseconds of one; None where it cannot.
    """

    entry: Entry
    words: str
    run: Callable[[], float] | None


#: (call, device index) -> the key of the cache's entry, and the candidates, the default first. Raises `Declined` or
#: ValueError with the reason where nothing serves the call.
Prepare = Callable[[Mapping[str, Any], int], tuple[str, Sequence[Candidate]]]


def tune(
    calls: Sequence[Mapping[str, Any]],
    device: int,
    prepare: Prepare,
    write: Callable[[Mapping[str, Entry]], None],
    done: Done | None = None,
) -> list[Row]:
    """Time the candidates of some calls and keep the winners.

    Args:
        calls: facts of a call each.
        device: index of a device of PyTorch's ``cuda`` type.
        prepare: candidates of a call, see `Prepare`.
        write: is given the entries of all winners, once.

    Returns:
        A row per call, with its facts and ``problem``: None, or why nothing was timed; ``candidates``, how many were.
        Where some were, ``first_us`` and ``best_us`` (medians of the first and of the winner), ``gain`` (their ratio
        less 1), ``place`` of the winner among them, ``algorithm`` in words.

    Raises:
        RuntimeError: the stream is being captured into a graph.
    """
    if device < torch.cuda.device_count() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuning times kernels, which a stream that is captured into a graph cannot do")
    rows: list[Row] = []
    kept: dict[str, Entry] = {}
    for place, call in enumerate(calls):
        rows.append({**call, **_row(call, device, prepare, kept)})
        if done is not None:
            done(place, rows[-1])
    if kept:
        write(kept)
    return rows


def _row(call: Mapping[str, Any], device: int, prepare: Prepare, kept: dict[str, Entry]) -> Row:
    if device >= torch.cuda.device_count():
        return {"problem": f"PyTorch sees no device {device}", "candidates": 0}
    with torch.cuda.device(device):
        try:
            key, candidates = prepare(call, device)
        except (Declined, ValueError) as error:
            return {"problem": str(error), "candidates": 0}
        if not candidates:
            return {"problem": "nothing to multiply", "candidates": 0}
        if candidates[0].run is None:  # there is nothing to compare the others with
            return {"problem": f"{candidates[0].words}: the default does not run here", "candidates": 0}
        times = _times([candidate.run for candidate in candidates])
    medians = [statistics.median(t) if t else float("inf") for t in times]
    best = choose(medians, _noise(times[0]))
    first_us, best_us = medians[0], medians[best]
    kept[key] = {**candidates[best].entry, "first_us": round(first_us, 2), "best_us": round(best_us, 2)}
    return {
        "problem": None,
        "candidates": len(candidates),
        "first_us": first_us,
        "best_us": best_us,
        "gain": first_us / best_us - 1,
        "place": best,
        "algorithm": candidates[best].words,
    }


def _times(runs: Sequence[Callable[[], float] | None]) -> list[list[float]]:
    """Microseconds of each candidate, one number per round. Rounds are interleaved, so that changing clock rates affect
    all candidates alike."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(ROUNDS + 1):
        for found, run in zip(times, runs):
            if run is not None:
                us = run()
                if round_:  # the first warms up
                    found.append(us)
    return times


def _noise(times: Sequence[float]) -> float:
    """Relative spread of equal runs: half the middle of the distances to the median, twice."""
    middle = statistics.median(times)
    return 2 * statistics.median(abs(t - middle) for t in times) / middle


def choose(medians: Sequence[float], noise: float) -> int:
    """The place of the winner: the first of those within `EQUAL` of the fastest, unless that gains less than noise."""
    fastest = min(medians)
    winner = next(i for i, t in enumerate(medians) if t <= fastest * (1 + EQUAL))
    return winner if medians[winner] < medians[0] * (1 - max(EQUAL, noise)) else 0


def sets_of(size: int) -> int:
    """How many sets of operands of so many bytes take turns."""
    return max(2, min(64, ROTATED_BYTES // max(size, 1)))


def repeated(run: Callable[[], None], least: int) -> Callable[[], float]:
    """A function that makes a call at least so many times, as one CUDA graph, and returns the microseconds of one.

    Args:
        run: makes the call, each time with the next set of operands.
        least: how many sets there are.
    """
    run()
    count = max(least, min(200, round(PART_US / max(_timed(run), 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return lambda: _timed(graph.replay) / count


def _timed(run: Callable[[], None]) -> float:
    """Microseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
