# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which configuration of a product is the fastest for a shape: timed ahead, by ``te-dispatch tune``.

Calls never tune. They look an entry up when their plan is made (`tuning_cache.tuned`) and take what ``configs/`` says
where there is none. Candidates are the configurations that ``configs/gemm.json`` lists for the chip; they multiply
random operands into memory of their own. One whose results differ from the default's by a bit is left out.

The interface for the command, the same in every backend: `OPERATORS`, `tune`, `cache_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from te_dispatch.backend_kit import caches
from te_dispatch.backend_kit import tuning as tuner
from te_dispatch_triton import tuning_cache
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.tuning_cache import TuningCacheWarning, cache_file

__all__ = ["OPERATORS", "TuningCacheWarning", "cache_file", "forget", "tune"]

#: Operators that `tune` takes calls of.
OPERATORS = ("gemm",)


def forget() -> None:
    """Read the cache again when the next plan is made, and make all plans anew."""
    tuning_cache.entries.cache_clear()
    caches.clear("te_dispatch_triton.gemm")


def tune(calls: Sequence[Mapping[str, Any]], device: int = 0, done: tuner.Done | None = None) -> list[tuner.Row]:
    """Time the candidates of some calls and keep the winners in `cache_file`.

    Args:
        calls: facts of a ``gemm`` each: ``m``, ``n``, ``k``, ``layout``, and where they are not the defaults
            ``a.dtype``, ``b.dtype`` (bf16), ``a.scaling``, ``b.scaling`` (tensor for encodings), ``out_dtype`` (bf16,
            else a's), ``bias``, ``accumulate`` (False), ``split_accumulator`` (None).
        device: device index.
        done: called after each call was tuned, with its index and its row.

    Returns:
        What `te_dispatch.backend_kit.tuning.tune` does.

    Raises:
        RuntimeError: the stream is being captured into a graph.
    """
    return tuner.tune(calls, device, _prepare, _keep, done)


def _prepare(call: Mapping[str, Any], device: int) -> tuple[str, list[tuner.Candidate]]:
    from te_dispatch_triton.tuning_operands import Scratch

    scratch = Scratch(call, device)
    found = [
        tuner.Candidate(tuning_cache.entry_of(choice), described(choice), run) for choice, run in scratch.candidates()
    ]
    return scratch.key(), found


def _keep(entries: Mapping[str, tuning_cache.Entry]) -> None:
    tuning_cache.write(cache_file(), entries)
    forget()


def described(choice: Choice) -> str:
    """A configuration in words."""
    sizes = "x".join(str(choice.constants[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    rest = [f"{k.lower()} {v}" for k, v in choice.constants.items() if not k.startswith("BLOCK_")]
    warps = f"{choice.config.num_warps} warps", f"{choice.config.num_stages} stages"
    return ", ".join([sizes, *warps, *rest, *(f"{k} {v}" for k, v in choice.config.options)])
