# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The conformance kit on this backend and the host library (tests/host_library), which stands for an AMD chip, with a
stand-in for AITER (tests/stand_in).

    python backends/rocm/tools/host_conformance.py gfx942 --level smoke

The options after the chip are those of ``te-dispatch conformance``; operands are tensors of the CPU. There are no
streams and graphs to judge, and the sums are the host's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_CHIPS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1200", "gfx1201")
_TESTS = Path(__file__).resolve().parent.parent / "tests"
_BUILD, _STAND_IN = _TESTS / "host_library" / "build.py", _TESTS / "stand_in"


def main(given: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if given is None else given)
    if not arguments or arguments[0] not in _CHIPS:
        sys.exit(f"expected a chip, one of {', '.join(_CHIPS)}, got {arguments[:1]}\n{__doc__}")
    spec = importlib.util.spec_from_file_location("host_library_build", _BUILD)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    try:
        folder = build.build()
    except build.Unavailable as reason:
        sys.exit(f"unavailable: {reason}")
    chip, *options = arguments
    path = os.pathsep.join(filter(None, (str(_STAND_IN), os.environ.get("PYTHONPATH"))))
    host = {
        "TE_DISPATCH_ROCM_PATH": str(folder), "TE_DISPATCH_ROCM_MEMORY": "host", "HOST_HIP_DEVICES": chip,
        "PYTHONPATH": path,
    }  # fmt: skip
    command = [sys.executable, "-m", "te_dispatch.cli", "conformance", "--backend", "rocm", "--device", "cpu", *options]
    os.execve(sys.executable, command, {**os.environ, **host})


if __name__ == "__main__":
    main()
