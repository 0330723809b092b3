#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Registers, spills and shared memory of every kernel in a build, against the bounds in ``resources.json``.

    python tools/resources.py                 the kernels that use most, and each breach of a bound
    python tools/resources.py --all           every kernel
    python tools/resources.py --times         a processor's seconds per source file, all chips together
    python tools/resources.py --record        take this build's figures as the bounds

A bound on registers is what was seen, rounded up to 8: the chip hands registers out in eights, so that a breach is one
that costs occupancy. Stack and spills are bytes per thread, shared memory bytes per block, as seen. The figures
belong to one release of the compiler, which is recorded with them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
RECORD = HERE / "resources.json"
#: The order of a record's figures.
FIGURES = ("registers", "stack", "spills", "shared")

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one chip.

    Attributes:
        registers: per thread.
        stack: bytes per thread of local memory: arrays that are indexed at run time, and spills.
        spills: bytes per thread stored to and loaded from local memory for want of registers.
        shared: bytes per block of shared memory whose size is known when compiling.
    """

    registers: int
    stack: int
    spills: int
    shared: int

    def bound(self) -> Usage:
        return Usage(-(-self.registers // 8) * 8, self.stack, self.spills, self.shared)


Kernels = dict[str, dict[str, Usage]]


def parse(text: str) -> dict[tuple[str, str], Usage]:
    """(mangled name, chip) -> usage, from what ``ptxas -v`` prints."""
    found: dict[tuple[str, str], Usage] = {}
    key: tuple[str, str] | None = None
    stack = spills = 0
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            key, stack, spills = (entry[1], entry[2]), 0, 0
        elif key is not None and (match := _STACK.search(line)):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif key is not None and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[key] = Usage(int(match[1]), stack, spills, int(shared[1]) if shared else 0)
            key = None
    return found


def names_of(mangled: list[str]) -> list[str]:
    """Readable names without return types and parameters: ``ted::norm::forward_rows<__nv_bfloat16, 8, true>``."""
    if not mangled:
        return []
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return [_shortened(name) for name in done.stdout.splitlines()]


def _shortened(name: str) -> str:
    name = re.sub(r"\((unsigned )?(int|long|bool|char)\)", "", name).replace("(anonymous namespace)::", "")
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return re.sub(r"^void ", "", name)


def kernels_of(build: Path) -> Kernels:
    """Every kernel of a build: name -> chip -> usage. Two kernels of one name (in two files) show as the larger."""
    found: dict[tuple[str, str], Usage] = {}
    for path in _reports(build).values():
        found.update(parse(path.read_text()))
    readable = dict(zip(mangled := sorted({name for name, _ in found}), names_of(mangled)))
    kernels: Kernels = {}
    for (name, chip), usage in found.items():
        chips = kernels.setdefault(readable[name], {})
        old = chips.get(chip, usage)
        chips[chip] = Usage(*(max(getattr(old, f), getattr(usage, f)) for f in FIGURES))
    return kernels


def _reports(build: Path) -> dict[str, Path]:
    """Source file -> what the launcher wrote of it. A build folder keeps those of sources that are gone: not these."""
    found = {}
    for path in sorted(build.rglob("*.cu.o.resources")):
        source = path.relative_to(build).as_posix().partition(".dir/")[2].removesuffix(".o.resources")
        if (HERE / source).exists():
            found[source] = path
    return found


def seconds_of(build: Path) -> dict[str, float]:
    """Source file -> a processor's seconds that its compilation took, the longest first."""
    times = {source: float(path.read_text().split(None, 2)[1]) for source, path in _reports(build).items()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def build_folder() -> Path | None:
    """The build that this interpreter's last install left beside the sources, None without one."""
    build = HERE / "build" / sys.implementation.cache_tag
    return build if any(build.rglob("*.cu.o.resources")) else None


def compiler_of(build: Path) -> str:
    """The release of the compiler, ``13.0``."""
    for path in build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        if match := re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', path.read_text()):
            return match[1]
    return "unknown"


def recorded(path: Path = RECORD) -> tuple[str, Kernels]:
    """The compiler's release and the bounds."""
    data = json.loads(path.read_text())
    kernels = {name: {chip: Usage(*row) for chip, row in chips.items()} for name, chips in data["kernels"].items()}
    return data["compiler"], kernels


def record(kernels: Kernels, compiler: str, path: Path = RECORD) -> None:
    """Write the bounds, a line per kernel, so that a change shows as lines."""
    rows = []
    for name in sorted(kernels):
        chips = {chip: kernels[name][chip].bound() for chip in sorted(kernels[name], key=_chip_order)}
        row = {chip: [getattr(usage, f) for f in FIGURES] for chip, usage in chips.items()}
        rows.append(f"    {json.dumps(name)}: {json.dumps(row)}")
    head = f'  "compiler": {json.dumps(compiler)},\n  "figures": {json.dumps(FIGURES)},\n'
    path.write_text("{\n" + head + '  "kernels": {\n' + ",\n".join(rows) + "\n  }\n}\n")


def _chip_order(chip: str) -> tuple[int, str]:
    return int(re.match(r"\d+", chip)[0]), chip  # type: ignore[index]


def breaches(kernels: Kernels, bounds: Kernels) -> list[str]:
    """A sentence for each figure over its bound, and for each kernel that has none."""
    found = []
    for name, chips in sorted(kernels.items()):
        for chip, usage in chips.items():
            bound = bounds.get(name, {}).get(chip)
            if bound is None:
                found.append(f"{name} on sm_{chip}: no bound is recorded")
                continue
            for figure in FIGURES:
                got, limit = getattr(usage, figure), getattr(bound, figure)
                if got > limit:
                    found.append(f"{name} on sm_{chip}: {figure} {got}, bound {limit}")
    return found


def _show(kernels: Kernels, rows: int | None) -> None:
    flat = [(usage, chip, name) for name, chips in kernels.items() for chip, usage in chips.items()]
    flat.sort(key=lambda item: (-item[0].spills, -item[0].stack, -item[0].registers, item[2]))
    print(f"{len(kernels)} kernels, {len(flat)} with every chip counted")
    print(f"{'registers':>9} {'stack':>6} {'spills':>6} {'shared':>7}  chip  kernel")
    for usage, chip, name in flat[:rows]:
        print(f"{usage.registers:9} {usage.stack:6} {usage.spills:6} {usage.shared:7}  {chip:5} {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="a build folder; by default the last install's")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    build = options.build or build_folder()
    if build is None:
        print("no build is found: pip install --no-build-isolation -e backends/cuda", file=sys.stderr)
        return 2
    if options.times:
        times = seconds_of(build)
        for source, seconds in times.items():
            print(f"{seconds:7.1f} s  {source}")
        print(f"{sum(times.values()):7.1f} s  together")
        return 0
    kernels = kernels_of(build)
    if options.record:
        record(kernels, compiler_of(build))
        print(f"{RECORD}: {len(kernels)} kernels")
        return 0
    _show(kernels, None if options.all else 20)
    found = breaches(kernels, recorded()[1]) if RECORD.exists() else ["resources.json is missing: --record"]
    print("\n".join(found) or "every figure is within its bound")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
