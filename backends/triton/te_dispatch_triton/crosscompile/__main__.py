# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``python -m te_dispatch_triton.crosscompile``: compile every kernel for chips that are not here, and say what came.

Exits with 1 where something does not compile, spills more than is recorded in ``bounds.json``, takes more shared memory
than the chip has, or multiplies codes by other instructions than the chip's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from te_dispatch_triton import probe


def main(given: Sequence[str] | None = None) -> int:
    reason = probe.missing_triton()
    if reason is None and probe.interpreting():
        reason = f"{probe.INTERPRET} is set: unset it to compile"
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    from te_dispatch_triton.crosscompile import run
    from te_dispatch_triton.crosscompile.calls import FAMILIES
    from te_dispatch_triton.crosscompile.chips import TARGETS
    from te_dispatch_triton.crosscompile.table import printed

    parser = argparse.ArgumentParser(prog="python -m te_dispatch_triton.crosscompile", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="CHIP")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one form of each kernel, and of each pair of encodings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row, with its configuration")
    parser.add_argument("--record", action="store_true", help="take the spills that are found as bounds")
    parser.add_argument(
        "--cache", metavar="FOLDER", default=os.environ.get(run.CACHE), help="keep what is compiled here"
    )
    asked = parser.parse_args(given)

    begun, left = time.monotonic(), len(asked.targets) * len(asked.families)

    def done(chip: str, family: str, rows: list[run.Row]) -> None:
        nonlocal left
        left -= 1
        failed = sum(row.problem is not None for row in rows)
        told = f"{chip:8} {family:16} {len(rows):4} compiled, {failed} with problems, {left} tasks left"
        print(f"[{time.monotonic() - begun:6.1f} s] {told}", file=sys.stderr, flush=True)

    rows = run.compiled(asked.targets, asked.families, asked.jobs, not asked.quick, done, asked.cache)
    if asked.record:
        run.record(rows)
        known = run.bounds()
        rows = [row if "recorded bound" not in (row.problem or "") else row._replace(problem=None) for row in rows]
        print(f"recorded {sum(map(len, known.values()))} bounds in {run.BOUNDS}", file=sys.stderr)
    if asked.json is not None:
        data = [{**row._asdict(), "facts": row.facts and row.facts._asdict()} for row in rows]
        asked.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(printed(rows, asked.targets))
    problems = [row.problem for row in rows if row.problem is not None]
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"{len(rows)} forms of kernels compiled for {len(asked.targets)} chips, {len(problems)} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
