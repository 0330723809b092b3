# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the chips that Triton compiles for can do, as data.

Sources: CUDA C++ Programming Guide; PTX ISA; AMD's "CDNA 3" and "CDNA 4" instruction set manuals, LLVM's AMDGPU usage
guide (wavefront sizes).
"""

from __future__ import annotations

from te_dispatch.core.facts import Arch

_OCP, _FNUZ = ("e4m3fn", "e5m2"), ("e4m3fnuz", "e5m2fnuz")
_FP8 = Arch(encodings=_OCP, fp8_matmul=True, fp8_layouts=("NT",))
_BLACKWELL = Arch(_OCP, True, ("TN", "NN", "NT"), ("mxfp8", "nvfp4"))
_CONSUMER_BLACKWELL = Arch(_OCP, True, ("NT",), ("mxfp8", "nvfp4"))
_ALL = ("TN", "NN", "NT")

ARCHS: dict[str, dict[str, Arch]] = {
    "nvidia": {
        "sm_80": Arch(),
        "sm_86": Arch(),
        "sm_87": Arch(),
        "sm_89": _FP8,
        "sm_90": _FP8,
        "sm_100": _BLACKWELL,
        "sm_103": _BLACKWELL,
        "sm_120": _CONSUMER_BLACKWELL,
        "sm_121": _CONSUMER_BLACKWELL,
    },
    "amd": {
        "gfx90a": Arch(warp_size=64),
        "gfx942": Arch(_FNUZ, True, _ALL, warp_size=64),
        "gfx950": Arch(_OCP, True, _ALL, ("mxfp8",), warp_size=64),
        "gfx1100": Arch(),
        "gfx1200": Arch(_OCP, True, _ALL),
        "gfx1201": Arch(_OCP, True, _ALL),
    },
}
