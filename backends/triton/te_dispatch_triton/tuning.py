# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which configuration of a product is the fastest for a shape: timed ahead, by ``te-dispatch tune``.

Calls never tune. They look an entry up when their plan is made (`tuning_cache.tuned`) and take what ``configs/`` says
where there is none. Candidates are the configurations that ``configs/gemm.json`` lists for the chip; they multiply
random operands into memory of their own. One whose results differ from the default's by a bit is left out.

The interface for the command, the same in every backend: `OPERATORS`, `tune`, `cache_file`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch_triton import tuning_cache
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.tuning_cache import TuningCacheWarning, cache_file

__all__ = ["OPERATORS", "TuningCacheWarning", "cache_file", "choose", "forget", "tune"]

#: Operators that `tune` takes calls of.
OPERATORS = ("gemm",)

ROUNDS = 7
#: Times that differ by less are equal: the earlier candidate is taken, on every machine.
EQUAL = 0.01

Row = dict[str, Any]


def forget() -> None:
    """Read the cache again when the next plan is made, and make all plans anew."""
    from te_dispatch_triton.gemm_plans import PLANS

    tuning_cache.entries.cache_clear()
    PLANS.clear()


def tune(
    calls: Sequence[Mapping[str, Any]], device: int = 0, done: Callable[[int, Mapping[str, Any]], None] | None = None
) -> list[Row]:
    """Time the candidates of some calls and keep the winners in `cache_file`.

    Args:
        calls: facts of a ``gemm`` each: ``m``, ``n``, ``k``, ``layout``, and where they are not the defaults
            ``a.dtype``, ``b.dtype`` (bf16), ``a.scaling``, ``b.scaling`` (tensor for encodings), ``out_dtype`` (bf16,
            else a's), ``bias``, ``accumulate`` (False), ``split_accumulator`` (None).
        device: device index.
        done: called with each call's place and result as it is there.

    Returns:
        A row per call: ``first_us`` and ``best_us`` (medians of the default and of the winner), ``gain`` (their ratio
        less 1), ``candidates`` that were timed, ``place`` of the winner among them, ``algorithm`` in words,
        ``problem`` where nothing serves the call.

    Raises:
        RuntimeError: the stream is being captured into a graph.
    """
    if device >= torch.cuda.device_count():
        rows = [{**call, "problem": f"PyTorch sees no device {device}", "candidates": 0} for call in calls]
        for place, row in enumerate(rows if done is not None else ()):
            done(place, row)  # type: ignore[misc]
        return rows
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuning times kernels, which a stream that is captured into a graph cannot do")
    rows = []
    kept: dict[str, tuning_cache.Entry] = {}
    with torch.cuda.device(device):
        for place, call in enumerate(calls):
            rows.append({**call, **_tune_one(call, device, kept)})
            if done is not None:
                done(place, rows[-1])
    if kept:
        tuning_cache.write(cache_file(), kept)
        forget()
    return rows


def _tune_one(call: Mapping[str, Any], device: int, kept: dict[str, tuning_cache.Entry]) -> Row:
    from te_dispatch.core.errors import Declined
    from te_dispatch_triton.tuning_operands import Scratch

    try:
        scratch = Scratch(call, device)
    except (Declined, ValueError) as error:
        return {"problem": str(error), "candidates": 0}
    found = scratch.candidates()
    if not found:
        return {"problem": "nothing to multiply", "candidates": 0}
    times: list[list[float]] = [[] for _ in found]
    for round_ in range(ROUNDS + 1):  # interleaved, so that clocks treat all alike; the first warms up
        for i, (_, run) in enumerate(found):
            us = run()
            if round_:
                times[i].append(us)
    medians = [statistics.median(t) for t in times]
    best = choose(medians, _noise(times[0]))
    choice = found[best][0]
    entry = {**tuning_cache.entry_of(choice), "first_us": round(medians[0], 2), "best_us": round(medians[best], 2)}
    kept[scratch.key()] = entry
    return {
        "problem": None,
        "candidates": len(found),
        "first_us": medians[0],
        "best_us": medians[best],
        "gain": medians[0] / medians[best] - 1,
        "place": best,
        "algorithm": described(choice),
    }


def described(choice: Choice) -> str:
    """A configuration in words."""
    sizes = "x".join(str(choice.constants[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    rest = [f"{k.lower()} {v}" for k, v in choice.constants.items() if not k.startswith("BLOCK_")]
    warps = f"{choice.config.num_warps} warps", f"{choice.config.num_stages} stages"
    return ", ".join([sizes, *warps, *rest, *(f"{k} {v}" for k, v in choice.config.options)])


def _noise(times: Sequence[float]) -> float:
    """Relative spread of equal runs: half the middle of the distances to the median, twice."""
    middle = statistics.median(times)
    return 2 * statistics.median(abs(t - middle) for t in times) / middle


def choose(medians: Sequence[float], noise: float) -> int:
    """The place of the winner: the first of those within `EQUAL` of the fastest, unless that gains less than noise."""
    fastest = min(medians)
    winner = next(i for i, t in enumerate(medians) if t <= fastest * (1 + EQUAL))
    return winner if medians[winner] < medians[0] * (1 - max(EQUAL, noise)) else 0
