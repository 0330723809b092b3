# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether the kit finds nothing in what is allowed: ``python -m te_dispatch_faulty.accept [--level full] [name ...]``.

Each variation gets the units that the kit plans for its implementation, and those of the other half where that varies
too. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.execute import Bench, run_unit
from te_dispatch.conformance.planning import plan
from te_dispatch.conformance.settings import Settings
from te_dispatch_faulty import binding
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.score import mine, unchanged_world
from te_dispatch_faulty.variations import VARIATIONS


def judged(bench: Bench, level: str, part: tuple[int, int], variations: Sequence[Fault]) -> list[dict[str, Any]]:
    """What became of variations of one implementation."""
    settings = Settings(
        backends=("varied",), implementations=tuple(filter(None, (variations[0].implementation, variations[0].also))),
        level=level, shard=part, device="cpu",
    )  # fmt: skip
    units = list(plan(bench.manager, settings).units)
    found = {
        one.name: {"variation": one.name, "level": level, "passed": 0, "failures": [], "seconds": 0.0}
        for one in variations
    }
    for unit in units:
        for one in variations:
            told: dict[str, Any] = found[one.name]
            with unchanged_world(), binding.fault(one):
                outcome = run_unit(unit, bench)
            told["seconds"] += outcome.seconds
            told["passed"] += outcome.state == "passed"
            if outcome.state == "failed":
                told["failures"].append([outcome.unit, outcome.message])
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variations", nargs="*")
    parser.add_argument("--level", default="smoke")
    parser.add_argument("--part", default="1/1", help="of the units")
    parser.add_argument("--share", type=Path, help="a folder: processes that are given it share the work among them")
    asked = parser.parse_args(arguments)
    part, parts = (int(n) for n in asked.part.split("/"))
    groups: dict[str, list[Fault]] = {}
    for one in VARIATIONS:
        if not asked.variations or one.name in asked.variations:
            groups.setdefault(f"{one.implementation}-{one.also}", []).append(one)
    bench = bench_of(Settings(backends=("varied",), device="cpu"))
    started = time.process_time()
    for name, variations in groups.items():
        if mine(f"{name}-{asked.level}", asked.share):
            for told in judged(bench, asked.level, (part, parts), variations):
                print(json.dumps(told), flush=True)
    print(json.dumps({"seconds": time.process_time() - started}), flush=True)


if __name__ == "__main__":
    main()
