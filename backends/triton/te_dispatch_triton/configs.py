# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Block sizes, warps and stages of each kernel, from data: ``configs/<family>.json``.

A file maps a kernel's name to arch -> list of entries, tried in order; ``default`` serves archs that are not listed,
and ``interpreter`` Triton's interpreter. In place of a list may stand the name of the arch whose list serves. An entry
holds

``up_to``
    sizes, by name, up to which it serves; absent for any;
``constants``
    values of ``tl.constexpr`` parameters that are a choice (block sizes), by name;
``num_warps``, ``num_stages``, ``options``
    as Triton's compilers take them.

What `tuning` measured on this machine comes before the files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from te_dispatch_triton.launch import Config
from te_dispatch_triton.targets import Target

FOLDER = Path(__file__).parent / "configs"
#: Bytes of shared memory that are left to reductions and to stores that change layouts.
_SCRATCH = 16384


class Choice(NamedTuple):
    """Constants by name, and how to compile."""

    constants: Mapping[str, Any]
    config: Config


@functools.cache
def table(family: str) -> Mapping[str, Mapping[str, list[Mapping[str, Any]] | str]]:
    """The file of a family."""
    with open(FOLDER / f"{family}.json", encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def entries(family: str, kernel: str, arch: str) -> list[Mapping[str, Any]]:
    """The entries that serve an arch, in order."""
    rows = table(family)[kernel]
    found = rows.get(arch) or rows["default"]
    return rows[found] if isinstance(found, str) else found  # type: ignore[return-value]


def choose(family: str, kernel: str, target: Target, fp_fusion: bool = False, **sizes: int) -> Choice:
    """The configuration of a kernel for a target and sizes. Callers on a hot path keep what they got.

    Raises:
        KeyError: the file has no entry that serves.
    """
    for entry in entries(family, kernel, target.arch):
        if all(sizes[name] <= bound for name, bound in entry.get("up_to", {}).items()):
            return as_choice(entry, fp_fusion)
    raise KeyError(f"configs/{family}.json: {kernel} for {target.arch} has no entry without up_to")


def as_choice(entry: Mapping[str, Any], fp_fusion: bool) -> Choice:
    """An entry of a file."""
    options = tuple(sorted(entry.get("options", {}).items()))
    return Choice(
        entry.get("constants", {}), Config(entry.get("num_warps", 4), entry.get("num_stages", 2), fp_fusion, options)
    )


def affordable(target: Target, stages: int, size: int) -> int:
    """So many of these pipeline stages as shared memory has room for, of `size` bytes each, and at least 1: none."""
    return max(min(stages, (target.shared_memory - _SCRATCH) // size), 1)


def in_turns(target: Target, down: int, across: int, most: int, stages: int, size: int) -> tuple[int, int]:
    """(programs that share a column of tiles, stages) of a kernel whose programs may take such tiles in turns; 0 stages
    where every tile has a program.

    Args:
        down, across: tiles.
        most: programs a processor; 0 where every tile has one.
        size: bytes of a tile.
    """
    if not most:
        return down, 0
    return min(max(most * target.processors // max(across, 1), 1), down), affordable(target, stages, size)
