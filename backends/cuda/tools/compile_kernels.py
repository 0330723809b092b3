#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""CMake's launcher of nvcc: runs the command, and writes what the assembler says of each kernel beside the object.

``x.cu.o.resources`` is what `resources.py` reads: lines of ``ptxas -v``, and the processor's seconds that the command
took. Everything else that nvcc prints goes on to the terminal.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys

_VERBOSE = re.compile(r"^(ptxas info|\s+\d+ bytes stack frame|\d+ bytes stack frame)")


def main(command: list[str]) -> int:
    if "-o" not in command or "-c" not in command:
        return subprocess.call(command)
    done = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True, errors="replace")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stderr.splitlines(keepends=True)
    sys.stderr.writelines(line for line in lines if not _VERBOSE.match(line))
    if done.returncode == 0:
        with open(command[command.index("-o") + 1] + ".resources", "w") as file:
            file.write(f"seconds {used.ru_utime + used.ru_stime:.1f}\n")
            file.writelines(line for line in lines if _VERBOSE.match(line))
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
