# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuned algorithms of a vendor's library on disk: one JSON file in the user's cache directory, replaced as a whole.

An entry belongs to a chip, a release of the library and a problem, and says which algorithm to take. What cannot be
read is ignored with a `TuningCacheWarning` and rewritten when the next entry is kept. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from te_dispatch.core import tuning_cache
from te_dispatch.core.tuning_cache import DIRECTORY as DIRECTORY
from te_dispatch.core.tuning_cache import TuningCacheWarning as TuningCacheWarning


class AlgorithmFile:
    """The algorithms that a backend tuned. An entry's ``algorithm`` is its bytes in hexadecimal, or None where the
    library's favourite was the best.

    Args:
        name: of the file.
        size: bytes of an algorithm.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size

    def path(self) -> Path:
        """In ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
        return tuning_cache.cache_file(self._name)

    def read(self, path: Path | None = None) -> dict[str, tuning_cache.Entry]:
        """Entries by key; none where there is no file, or, with a warning, where it cannot be read."""
        return tuning_cache.read(path or self.path(), self._check)

    def write(self, entries: Mapping[str, tuning_cache.Entry], path: Path | None = None) -> None:
        """Add entries to the file: a new file takes its place, so that no reader ever sees half of one.

        Raises:
            OSError: the directory cannot be written, or a newer te_dispatch wrote the file.
        """
        tuning_cache.write(path or self.path(), entries, self._check)

    def algorithm_of(self, entry: Mapping[str, Any]) -> bytes | None:
        """The entry's algorithm; None where the library's favourite was the best."""
        text = entry["algorithm"]
        if text is None:
            return None
        found = bytes.fromhex(text)
        if len(found) != self._size:
            raise ValueError(f"an algorithm of {len(found)} bytes, expected {self._size}")
        return found

    def _check(self, key: str, entry: Mapping[str, Any]) -> None:
        try:
            self.algorithm_of(entry)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{key}: it has no readable algorithm ({error!r})") from None
