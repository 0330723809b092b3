# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which algorithm of cuBLASLt's list is the fastest for a shape: timed ahead, by ``te-dispatch tune``.

Calls never tune. They look an entry up when their plan is made (`algorithm_for`), and take the library's favourite
where there is none. Tuning multiplies random operands into memory of its own.

The interface for the command, the same in every backend: `OPERATORS` and `tune`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch_cuda import libraries, tuning_cache
from te_dispatch_cuda.tuning_cache import TuningCacheWarning, cache_file

if TYPE_CHECKING:
    from te_dispatch_cuda.gemm_plans import Problem

__all__ = ["OPERATORS", "TuningCacheWarning", "algorithm_for", "cache_file", "forget", "tune"]

#: Operators that `tune` takes calls of.
OPERATORS = ("gemm",)

CANDIDATES = 32
ROUNDS = 7
#: Times that differ by less are equal: the earlier one in the library's list is taken, on every machine.
EQUAL = 0.01
#: Operands take turns, so that together they exceed any chip's level-2 cache, as in training.
_ROTATED_BYTES = 256 << 20
_TIMED_US = 400.0


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    return tuning_cache.read(cache_file())


def forget() -> None:
    """Read the cache again when the next plan is made, and make all plans anew."""
    from te_dispatch_cuda.gemm_plans import CALLS, PLANS

    _entries.cache_clear()
    PLANS.clear()
    CALLS.clear()


def algorithm_for(problem: Problem) -> bytes | None:
    """The tuned algorithm of a problem, None where there is none."""
    entry = _entries().get(key_of(problem)) if _entries() else None
    return None if entry is None else tuning_cache.algorithm_of(entry)


@functools.cache
def _chip(device: int) -> str:
    properties = torch.cuda.get_device_properties(device)
    library = libraries.cublaslt()
    version = library if isinstance(library, str) else library.version_text
    return f"sm_{properties.major}{properties.minor} {properties.multi_processor_count} cublaslt {version}"


def key_of(problem: Problem) -> str:
    """The chip, the library, and everything of the problem that an algorithm may depend on: it finds block scales in
    one layout, wherever they came from."""
    facts = {name: int(x) for name, x in problem._asdict().items() if name not in ("device", "a_scales", "b_scales")}
    return " ".join([_chip(problem.device), *(f"{name}={x}" for name, x in facts.items())])


def tune(
    calls: Sequence[Mapping[str, Any]], device: int = 0, done: Callable[[int, Mapping[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Time the library's algorithms for some calls and keep the winners in `cache_file`.

    Args:
        calls: facts of a ``gemm`` each: ``m``, ``n``, ``k``, ``layout``, and where they are not the defaults
            ``a.dtype``, ``b.dtype`` (bf16), ``a.scaling``, ``b.scaling`` (tensor for encodings), ``out_dtype`` (bf16,
            else a's), ``bias``, ``accumulate`` (False), ``split_accumulator`` (None).
        device: CUDA device index.
        done: called with each call's place and result as it is there.

    Returns:
        A row per call: ``first_us`` and ``best_us`` (medians), ``gain`` (their ratio less 1), ``candidates``,
        ``place`` of the winner in the library's list, ``algorithm`` in words, ``problem`` with the library's refusal
        where it has none.

    Raises:
        RuntimeError: the stream is being captured into a graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuning times kernels, which a stream that is captured into a graph cannot do")
    rows: list[dict[str, Any]] = []
    kept: dict[str, dict[str, Any]] = {}
    with torch.cuda.device(device):
        for place, call in enumerate(calls):
            row = _tune_one(call, device, kept)
            rows.append({**call, **row})
            if done is not None:
                done(place, rows[-1])
    if kept:
        tuning_cache.write(cache_file(), kept)
        forget()
    return rows


def _tune_one(call: Mapping[str, Any], device: int, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from te_dispatch.core.errors import Declined
    from te_dispatch_cuda.tuning_operands import Scratch

    try:
        scratch = Scratch(call, device, _ROTATED_BYTES)
    except Declined as error:
        return {"problem": str(error), "candidates": 0}
    found = scratch.candidates(CANDIDATES)
    if not found:
        return {"problem": "nothing to multiply", "candidates": 0}
    times = _times(scratch, found)
    best = choose([statistics.median(t) if t else float("inf") for t in times], _noise(times[0]))
    first_us, best_us = statistics.median(times[0]), statistics.median(times[best])
    algorithm, _, words = found[best]
    kept[key_of(scratch.problem)] = {
        "algorithm": None if best == 0 else algorithm.hex(),
        "words": words,
        "first_us": round(first_us, 2),
        "best_us": round(best_us, 2),
    }
    return {
        "problem": None,
        "candidates": len(found),
        "first_us": first_us,
        "best_us": best_us,
        "gain": first_us / best_us - 1,
        "place": best,
        "algorithm": words,
    }


def _times(scratch: Any, found: Sequence[tuple[bytes, int, str]]) -> list[list[float]]:
    """Microseconds of each candidate, one number per round. Rounds interleave, so that clocks treat all alike."""
    runs = [scratch.captured(algorithm, workspace, _TIMED_US) for algorithm, workspace, _ in found]
    times: list[list[float]] = [[] for _ in found]
    for round_ in range(ROUNDS + 1):
        for i, run in enumerate(runs):
            if run is not None:
                us = run()
                if round_:  # the first warms up
                    times[i].append(us)
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
