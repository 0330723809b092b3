# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuned algorithms on disk: one JSON file in the user's cache directory, replaced as a whole.

An entry belongs to a chip, a release of cuBLASLt and a problem, and says which algorithm to take. What cannot be read
is ignored with a `TuningCacheWarning` and rewritten when the next entry is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_dispatch.core import tuning_cache
from te_dispatch.core.tuning_cache import DIRECTORY, TuningCacheWarning

__all__ = ["DIRECTORY", "TuningCacheWarning", "algorithm_of", "cache_file", "read", "write"]


def cache_file() -> Path:
    """``cuda_gemm.json`` in ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
    return tuning_cache.cache_file("cuda_gemm.json")


def read(path: Path) -> dict[str, tuning_cache.Entry]:
    """Entries by key; none where there is no file, or, with a warning, where it cannot be read."""
    return tuning_cache.read(path, _check)


def write(path: Path, entries: Mapping[str, tuning_cache.Entry]) -> None:
    """Add entries to the file: a new file takes its place, so that no reader ever sees half of one.

    Raises:
        OSError: the directory cannot be written, or a newer te_dispatch wrote the file.
    """
    tuning_cache.write(path, entries, _check)


def algorithm_of(entry: Mapping[str, Any]) -> bytes | None:
    """The entry's algorithm; None where the library's favourite was the best."""
    text = entry["algorithm"]
    if text is None:
        return None
    found = bytes.fromhex(text)
    if len(found) != 64:
        raise ValueError(f"an algorithm of {len(found)} bytes, expected 64")
    return found


def _check(key: str, entry: Mapping[str, Any]) -> None:
    try:
        algorithm_of(entry)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{key}: it has no readable algorithm ({error!r})") from None
