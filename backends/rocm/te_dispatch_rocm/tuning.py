# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which algorithm of hipBLASLt's list is the fastest for a shape: timed ahead, by ``te-dispatch tune``.

Calls never tune. They look an entry up when their plan is made (`algorithm_for`), and take the library's favourite
where there is none, or where the library lists the entry's algorithm no longer. Tuning multiplies random operands into
memory of its own.

The interface for the command, the same in every backend: `OPERATORS` and `tune`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.backend_kit import caches
from te_dispatch.backend_kit import tuning as tuner
from te_dispatch.backend_kit.algorithms import AlgorithmFile, TuningCacheWarning
from te_dispatch.core.tuning_cache import Entry
from te_dispatch_rocm import devices
from te_dispatch_rocm.archs import ARCHS, FNUZ, OCP

if TYPE_CHECKING:
    from te_dispatch_rocm.gemm_plans import Problem

__all__ = ["OPERATORS", "TuningCacheWarning", "algorithm_for", "cache_file", "forget", "tune"]

#: Operators that `tune` takes calls of.
OPERATORS = ("gemm",)

CANDIDATES = 32

#: Bytes of hipBLASLt's algorithms.
_FILE = AlgorithmFile("rocm_gemm.json", 24)
#: () -> where the winners are kept.
cache_file = _FILE.path


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    return _FILE.read()


def forget() -> None:
    """Read the cache again when the next plan is made, and make all plans anew."""
    _entries.cache_clear()
    caches.clear("te_dispatch_rocm.")


def algorithm_for(problem: Problem) -> bytes | None:
    """The tuned algorithm of a problem, None where there is none."""
    entry = _entries().get(key_of(problem)) if _entries() else None
    return None if entry is None else _FILE.algorithm_of(entry)


@functools.cache
def _chip(index: int) -> str:
    device = devices.found().devices[index]
    return f"{device.arch} {device.name.replace(' ', '_')} hipblaslt {device.version or 'unknown'}"


def key_of(problem: Problem) -> str:
    """The chip, the library's release, and all of the problem but which device of that chip it is on: types are
    encodings, so FNUZ and OCP are told apart."""
    facts = {name: int(x) for name, x in problem._asdict().items() if name != "device"}
    return " ".join([_chip(problem.device), *(f"{name}={x}" for name, x in facts.items())])


def tune(calls: Sequence[Mapping[str, Any]], device: int = 0, done: tuner.Done | None = None) -> list[tuner.Row]:
    """Time the library's algorithms for some calls and keep the winners in `cache_file`.

    Args:
        calls: facts of a ``gemm`` each: ``m``, ``n``, ``k``, ``layout``, and where they are not the defaults
            ``a.dtype``, ``b.dtype`` (bf16), ``a.scaling``, ``b.scaling`` (tensor for encodings), ``out_dtype`` (bf16,
            else a's), ``bias``, ``accumulate`` (False). Encodings of OCP stand for the chip's own.
        device: index of PyTorch's device.
        done: called after each call was tuned, with its index and its row.

    Returns:
        What `te_dispatch.backend_kit.tuning.tune` does. ``place`` is that in the library's list.

    Raises:
        RuntimeError: the stream is being captured into a graph.
    """
    return tuner.tune([own_encodings(call, device) for call in calls], device, _prepare, _keep, done)


def own_encodings(call: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A call whose encodings are those that the device has: e4m3fnuz for e4m3fn on a chip with FNUZ."""
    known = devices.found().devices
    row = ARCHS["amd"].get(known[index].arch) if index < len(known) else None
    flavours = dict(zip(OCP, FNUZ)) if row is not None and row.encodings == FNUZ else {}
    return {name: flavours.get(x, x) if name.endswith(".dtype") else x for name, x in call.items()}


def _prepare(call: Mapping[str, Any], device: int) -> tuple[str, list[tuner.Candidate]]:
    from te_dispatch_rocm.tuning_operands import Scratch

    scratch = Scratch(call, device)
    return key_of(scratch.problem), scratch.candidates(CANDIDATES)


def _keep(entries: Mapping[str, Entry]) -> None:
    _FILE.write(entries)
    forget()
