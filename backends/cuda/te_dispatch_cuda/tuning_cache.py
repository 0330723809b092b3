# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuned algorithms on disk: one JSON file in the user's cache directory, replaced as a whole.

An entry belongs to a chip, a release of cuBLASLt and a problem, and says which algorithm to take. What cannot be read
is ignored with a `TuningCacheWarning` and rewritten when the next entry is kept.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

DIRECTORY = "TE_DISPATCH_CACHE_DIR"
_FORMAT = 1


class TuningCacheWarning(UserWarning):
    """A tuning cache that cannot be read or written; calls take the library's own choice."""


def cache_file() -> Path:
    """``cuda_gemm.json`` in ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return Path(named) / "cuda_gemm.json"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "te_dispatch" / "cuda_gemm.json"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Entries by key; none where there is no file, or, with a warning, where it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {_FORMAT}")
        entries: dict[str, dict[str, Any]] = data["entries"]
        for entry in entries.values():
            algorithm_of(entry)
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"tuning cache {path}: ignored, because it cannot be read ({type(error).__name__}: {error}); "
            "te-dispatch tune writes a new one",
            TuningCacheWarning,
            stacklevel=3,
        )
        return {}


def algorithm_of(entry: dict[str, Any]) -> bytes | None:
    """The entry's algorithm; None where the library's favourite was the best."""
    text = entry["algorithm"]
    if text is None:
        return None
    found = bytes.fromhex(text)
    if len(found) != 64:
        raise ValueError(f"an algorithm of {len(found)} bytes, expected 64")
    return found


def write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Add entries to the file: a new file takes its place, so that no reader ever sees half of one.

    Raises:
        OSError: the directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningCacheWarning)  # said when it was read for use
        merged = {**read(path), **entries}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "entries": merged}, file, indent=1, sort_keys=True)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
