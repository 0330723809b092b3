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
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_dispatch_triton import configs, probe
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.targets import Target

DIRECTORY = "TE_DISPATCH_CACHE_DIR"
_FORMAT = 1
_FIELDS = {"constants": dict, "num_warps": int, "num_stages": int, "options": dict}

Entry = Mapping[str, Any]


class TuningCacheWarning(UserWarning):
    """A tuning cache that cannot be read; calls take the configurations that the files name."""


def cache_file() -> Path:
    """``triton.json`` in ``TE_DISPATCH_CACHE_DIR``, else in ``te_dispatch`` below the user's cache directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return Path(named) / "triton.json"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "te_dispatch" / "triton.json"


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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {_FORMAT}")
        found: dict[str, Entry] = data["entries"]
        for key, entry in found.items():
            for field, kind in _FIELDS.items():
                if not isinstance(entry[field], kind):
                    raise ValueError(f"{key}: {field} is {entry[field]!r}, expected {kind.__name__}")
        return found
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


def write(path: Path, kept: Mapping[str, Entry]) -> None:
    """Add entries to the file: a new file takes its place, so that no reader ever sees half of one.

    Raises:
        OSError: the directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningCacheWarning)  # said when it was read for use
        merged = {**read(path), **kept}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "entries": merged}, file, indent=1, sort_keys=True)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
