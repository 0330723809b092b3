# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``python -m gfx_emulator opcodes FILE...``: which instructions of code objects are implemented and which are not.

Exits with 1 if one is not, with 2 if nothing can be decoded here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gfx_emulator import code_object, decode
from gfx_emulator.errors import EmulatorError
from gfx_emulator.machine import program
from gfx_emulator.registry import build


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gfx_emulator", description="Tools for AMDGPU code objects.")
    commands = parser.add_subparsers(dest="command", required=True)
    opcodes = commands.add_parser("opcodes", help="list instructions, those without an implementation first")
    opcodes.add_argument("files", nargs="+", type=Path, metavar="FILE", help="code objects (.hsaco)")
    asked = parser.parse_args(given)
    reason = decode.missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    return _opcodes(asked.files)


def _opcodes(files: Sequence[Path]) -> int:
    seen: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    kernels = 0
    for file in files:
        for kernel in code_object.load(file.read_bytes()).values():
            kernels += 1
            decoded = program(kernel)
            for instruction in decoded.instructions:
                seen[instruction.name] += 1
                try:
                    build(instruction, decoded.context)
                except EmulatorError as error:
                    reasons.setdefault(instruction.name, f"{kernel.name} ({kernel.arch}): {error}")
    for name, count in sorted(seen.items(), key=lambda one: (one[0] not in reasons, one[0])):
        print(f"{count:8} {name}" + (f"  NOT IMPLEMENTED: {reasons[name]}" if name in reasons else ""))
    print(f"{kernels} kernels, {len(seen)} opcodes, {len(reasons)} of them not implemented")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
