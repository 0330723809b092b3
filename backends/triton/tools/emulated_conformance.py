# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The conformance kit on the Triton backend's kernels for an AMD chip, executed by `gfx_emulator` on CPU tensors.

    python backends/triton/tools/emulated_conformance.py gfx942 --op rmsnorm_fwd

The options after the chip are those of ``te-dispatch conformance``. The kit compares results with the reference, as on
hardware; it runs in one process, and has no streams and graphs to judge.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

_CHIPS = ("gfx942", "gfx950")


def main(given: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if given is None else given)
    if not arguments or arguments[0] not in _CHIPS:
        print(f"expected a chip, one of {', '.join(_CHIPS)}, got {arguments[:1]}\n{__doc__}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("gfx_emulator") is None:
        print("tools/gfx_emulator is not installed", file=sys.stderr)
        return 2
    from te_dispatch.cli import main as te_dispatch
    from te_dispatch_triton.crosscompile import emulated

    reason = emulated.missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    arch, *options = arguments
    sys.argv = ["te-dispatch", "conformance", "--backend", "triton", "--device", "cpu", "--in-process", *options]
    with emulated.emulated(arch) as emulator:
        try:
            te_dispatch()
        except SystemExit as ended:
            code = ended.code
        else:
            code = 0
    print(f"{len(emulator.launches)} launches of {len(set(emulator.launches))} kernels were executed on {arch}")
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main())
