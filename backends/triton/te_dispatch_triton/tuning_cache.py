# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuned configurations on disk: one JSON file in the user's cache directory, replaced as a whole.

An entry belongs to a kernel, a chip, a release of Triton, the operands' encodings and a bucket of sizes, and holds a
configuration as ``configs/*.json`` write it. What cannot be read is ignored with a `TuningCacheWarning` and rewritten
when the next entry is kept.

A tuned configuration gives the same bits as the one it replaces: `tuning` keeps no other. So the file changes no
result, under no policy and on no rank of a cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_dispatch.core import tuning_cache
from te_dispatch.core.tuning_cache import DIRECTORY, Entry, TuningCacheWarning
from te_dispatch_triton import configs, probe
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.targets import Target

__all__ = [
    "DIRECTORY", "Entry", "TuningCacheWarning", "bucket", "cache_file", "entries", "entry_of", "key_of", "read",
    "tuned", "write",
]  # fmt: skip

_FIELDS = {"constants": dict, "num_warps": int, "num_stages": int, "options": dict}


def cache_file() -> Path:
    """``triton.json`` in ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
    return tuning_cache.cache_file("triton.json")


def bucket(size: int) -> int:
    """Sizes that share a configuration go by one number: the size rounded up to a quarter of its octave."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def key_of(family: str, kernel: str, target: Target, codes: Sequence[str], sizes: Sequence[int]) -> str:
    """What an entry belongs to."""
    return " ".join(
        (
            f"{family}/{kernel}", f"{target.arch}/{target.processors}", f"triton/{probe.triton_version()}",
            "x".join(codes), "x".join(str(bucket(size)) for size in sizes),
        )
    )  # fmt: skip


@functools.cache
def entries() -> Mapping[str, Entry]:
    """The file's, read once, at the first choice."""
    return read(cache_file())


def tuned(
    family: str, kernel: str, target: Target, codes: Sequence[str], sizes: Sequence[int], fp_fusion: bool
) -> Choice | None:
    """The configuration that was the fastest on this machine; None where none was timed."""
    if not entries():
        return None
    entry = entries().get(key_of(family, kernel, target, codes, sizes))
    return None if entry is None else configs.as_choice(entry, fp_fusion)


def entry_of(choice: Choice) -> dict[str, Any]:
    """A configuration as it is kept."""
    return {
        "constants": dict(choice.constants),
        "num_warps": choice.config.num_warps,
        "num_stages": choice.config.num_stages,
        "options": dict(choice.config.options),
    }


def read(path: Path) -> Mapping[str, Entry]:
    """Entries by key; none where there is no file, or, with a warning, where it cannot be read."""
    return tuning_cache.read(path, _check)


def write(path: Path, kept: Mapping[str, Entry]) -> None:
    """Add entries to the file: a new file takes its place, so that no reader ever sees half of one.

    Raises:
        OSError: the directory cannot be written, or a newer te_dispatch wrote the file.
    """
    tuning_cache.write(path, kept, _check)


def _check(key: str, entry: Entry) -> None:
    """Refuse, with a ValueError, what Triton would fail to compile in the middle of a training step."""
    for field, kind in _FIELDS.items():
        value = entry.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{key}: {field} is {value!r}, expected {kind.__name__}")
    warps, stages = entry["num_warps"], entry["num_stages"]
    if not 1 <= warps <= 32 or warps & (warps - 1):
        raise ValueError(f"{key}: num_warps is {warps}, expected a power of two up to 32")
    if not 0 <= stages <= 16:
        raise ValueError(f"{key}: num_stages is {stages}, expected 0 to 16")
    known = _constants(key.partition(" ")[0])
    for name, value in entry["constants"].items():
        if known is not None and name not in known:
            raise ValueError(f"{key}: unknown constant {name!r}; known: {', '.join(sorted(known))}")
        if not isinstance(value, (int, str)):
            raise ValueError(f"{key}: {name} is {value!r}, expected a number or a word")


@functools.cache
def _constants(kernel: str) -> frozenset[str] | None:
    """The constants that the files have for ``family/kernel``, None where they have no such kernel."""
    family, _, name = kernel.partition("/")
    if not (configs.FOLDER / f"{family}.json").is_file() or name not in configs.table(family):
        return None
    rows = configs.table(family)[name].values()
    return frozenset(c for row in rows if not isinstance(row, str) for entry in row for c in entry.get("constants", {}))
