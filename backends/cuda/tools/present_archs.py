#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Prints TE_DISPATCH_CUDA_ARCHS for the GPUs of this machine, such as ``90a``; nothing where there is none."""

from __future__ import annotations

import shutil
import subprocess

#: Chips whose own instructions the kernels use are built for by name; code for them runs nowhere else.
NAMED = {"90": "90a", "100": "100a"}


def present(capabilities: str) -> list[str]:
    """From lines such as ``9.0``: each chip once, the oldest first."""
    numbers = {line.strip().replace(".", "") for line in capabilities.splitlines()}
    return [NAMED.get(number, number) for number in sorted(filter(str.isdigit, numbers), key=int)]


def main() -> None:
    program = shutil.which("nvidia-smi")
    if program is not None:
        command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
        print(",".join(present(subprocess.run(command, capture_output=True, text=True, check=False).stdout)))


if __name__ == "__main__":
    main()
