# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What backends measured on this machine: one JSON file each in the user's cache directory, for all processes.

A file holds entries by key. Entries are added under a lock and the file is replaced as a whole, so that processes that
tune at the same time lose nothing and no reader sees half of a file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from te_dispatch.core import files

DIRECTORY = "TE_DISPATCH_CACHE_DIR"
FORMAT = 1

Entry = Mapping[str, Any]


class TuningCacheWarning(UserWarning):
    """A tuning cache that cannot be read, or that anyone may change."""


def cache_file(name: str) -> Path:
    """`name` in ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return Path(os.path.expanduser(named)) / name
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "te_dispatch" / name


def read(path: Path, check: Callable[[str, Any], None]) -> dict[str, Entry]:
    """Entries by key; none where there is no file, or, with a `TuningCacheWarning`, where it cannot be read.

    Args:
        path: the file.
        check: is given each key and entry and raises ValueError for one that cannot be used.
    """
    try:
        found = _entries(_data(path), check)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(
            f"tuning cache {path}: ignored, because it cannot be read ({error}); te-dispatch tune writes a new one, "
            "unless a newer te_dispatch wrote this"
        )
        return {}
    if os.name == "posix" and path.stat().st_mode & stat.S_IWOTH:
        _warn(f"tuning cache {path}: every user of this machine may change it; chmod o-w {path}")
    return found


def write(path: Path, entries: Mapping[str, Entry], check: Callable[[str, Any], None]) -> None:
    """Add entries to the file. What cannot be read of it is replaced.

    Raises:
        OSError: the directory cannot be written, or a newer te_dispatch wrote the file, which is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(path):
        try:
            data = _data(path)
            _refuse_newer(path, data)
            there = _entries(data, check)
        except (FileNotFoundError, ValueError):
            there = {}  # said when it was read for use
        content = {"format": FORMAT, "entries": {**there, **entries}}
        files.replace(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _data(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _entries(data: Any, check: Callable[[str, Any], None]) -> dict[str, Entry]:
    if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
        raise ValueError("it is no object with entries")
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')!r}, expected {FORMAT}")
    entries: dict[str, Entry] = data["entries"]
    for key, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{key}: expected an object, got {entry!r}")
        check(key, entry)
    return entries


def _refuse_newer(path: Path, data: Any) -> None:
    found = data.get("format") if isinstance(data, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise FileExistsError(
            errno.EEXIST,
            f"a newer te_dispatch wrote it (format {found}, this one writes {FORMAT}); set {DIRECTORY} to another "
            "folder",
            str(path),
        )


def _warn(message: str) -> None:
    warnings.warn(message, TuningCacheWarning, stacklevel=4)
