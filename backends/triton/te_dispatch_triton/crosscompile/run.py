# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The matrix: every form of every kernel, for every chip, in processes of their own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from te_dispatch_triton import miscompiled
from te_dispatch_triton.crosscompile.assembly import Facts, facts_of
from te_dispatch_triton.crosscompile.chips import TARGETS, wrong_instructions
from te_dispatch_triton.crosscompile.gather import codes_of, first_of_each, variants
from te_dispatch_triton.crosscompile.matrix import compile_for
from te_dispatch_triton.launch import CompileFailure, Launch, describe
from te_dispatch_triton.targets import Target

#: Names a folder that keeps what is compiled, for `python -m te_dispatch_triton.crosscompile` and the test of it.
CACHE = "TE_DISPATCH_CROSSCOMPILE_CACHE"
#: Families whose kernels take longest to compile.
_LONG = ("attention", "gemm", "norm")
BOUNDS = Path(__file__).parent / "bounds.json"


class Row(NamedTuple):
    """One form of a kernel on one chip. `problem`: what is wrong with it; `facts` are None where it did not compile."""

    family: str
    kernel: str
    chip: str
    call: str
    configuration: str
    facts: Facts | None
    problem: str | None


def bounds() -> dict[str, dict[str, int]]:
    """Spills that are known, by kernel and chip; none for a kernel that is not listed."""
    found: dict[str, dict[str, int]] = json.loads(BOUNDS.read_text(encoding="utf-8")) if BOUNDS.exists() else {}
    return found


def record(rows: Iterable[Row]) -> None:
    """Write the spills that were found as the bounds of their kernels and chips; the others' stay."""
    known, found = bounds(), {}
    for row in rows:
        if row.facts is not None:
            place = (row.kernel, row.chip)
            found[place] = max(found.get(place, 0), row.facts.spills)
    for (kernel, chip), spills in found.items():
        known.setdefault(kernel, {})[chip] = spills
    kept = {kernel: {c: n for c, n in sorted(of.items()) if n} for kernel, of in sorted(known.items())}
    BOUNDS.write_text(json.dumps({k: of for k, of in kept.items() if of}, indent=1) + "\n", encoding="utf-8")


def compiled(
    chips: Sequence[str],
    families: Sequence[str],
    jobs: int,
    each_form: bool = True,
    done: Callable[[str, str, list[Row]], None] | None = None,
    cache: str | None = None,
) -> list[Row]:
    """Compile what the families' calls launch on the chips.

    Args:
        each_form: every form, else one of each kernel and of each pair of encodings.
        done: called with chip, family and rows as they are there.
        cache: a folder that keeps what was compiled for the next time; None for one that is thrown away.
    """
    # What takes longest first, so that no processor is left with it in the end.
    tasks = sorted(itertools.product(chips, families), key=lambda task: task[1] not in _LONG)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="te_dispatch_triton_") as folder:
        # Forked, because importing PyTorch takes seconds, and one task to a process, because host code keeps its
        # choices for a device, which here stands for many.
        context = multiprocessing.get_context("fork")
        jobs, kept = min(jobs, len(tasks)), (cache or folder,)
        with context.Pool(jobs, initializer=_cache_in, initargs=kept, maxtasksperchild=1) as pool:
            for chip, family, found in pool.imap_unordered(_task, [(c, f, each_form) for c, f in tasks]):
                rows += found
                if done is not None:
                    done(chip, family, found)
    return sorted(rows, key=lambda row: (row.family, row.kernel, chips.index(row.chip), row.call))


def _cache_in(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _task(task: tuple[str, str, bool]) -> tuple[str, str, list[Row]]:
    chip, family, each_form = task
    try:
        found = variants(TARGETS[chip], family)
    except Exception:
        problem = f"the calls of {family} raise on {chip}:\n{traceback.format_exc()}"
        return chip, family, [Row(family, "-", chip, "-", "-", None, problem)]
    known = bounds()
    chosen = found if each_form else first_of_each(found)
    return chip, family, [row_of(chip, v.family, v.call, v.launch, known) for v in chosen]


def row_of(chip: str, family: str, call: str, launch: Launch, known: dict[str, dict[str, int]]) -> Row:
    """Compile one launch and judge it."""
    target, kernel = TARGETS[chip], launch.kernel.name
    configuration = describe(launch.kernel, launch.constants, launch.config)
    try:
        binary = compile_for(launch, target)
        facts = facts_of(binary)
    except CompileFailure as error:
        return Row(family, kernel, chip, call, configuration, None, str(error))
    problem = miscompiled.found(binary.asm) or _unfit(target, launch, facts, known.get(kernel, {}).get(chip, 0))
    if problem is not None:
        problem = f"Triton kernel {kernel} for {chip} with {configuration} ({call}): {problem}"
    return Row(family, kernel, chip, call, configuration, facts, problem)


def _unfit(target: Target, launch: Launch, facts: Facts, bound: int) -> str | None:
    """What a chip, or its recorded bound of spills, has against a binary."""
    if facts.shared > target.shared_memory:
        return f"{facts.shared} bytes of shared memory, the chip has {target.shared_memory}"
    if facts.spills > bound:
        return f"spills {facts.spills}, recorded bound {bound}"
    codes = codes_of(launch)
    return None if codes is None else wrong_instructions(target, codes, facts.instructions)
