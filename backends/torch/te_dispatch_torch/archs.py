# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What chip generations can do, as data: FP8 encodings, FP8 matrix units, warp sizes.

Sources: NVIDIA's CUDA C++ Programming Guide and PTX ISA (FP8 from sm_89; block-scaled units from sm_100); AMD's CDNA3,
CDNA4 and RDNA4 instruction set manuals (FNUZ on gfx94x, OCP on gfx950 and gfx12xx).
"""

from __future__ import annotations

from te_dispatch.core.facts import Arch

_OCP = ("e4m3fn", "e5m2")
_FNUZ = ("e4m3fnuz", "e5m2fnuz")
_ALL_LAYOUTS = ("TN", "NN", "NT")
# Ada and Hopper multiply FP8 only where both operands are contracted along their last dimension.
_HOPPER = Arch(encodings=_OCP, fp8_matmul=True, fp8_layouts=("NT",))
_BLACKWELL = Arch(_OCP, True, _ALL_LAYOUTS, ("mxfp8", "nvfp4"))
_CONSUMER_BLACKWELL = Arch(_OCP, True, ("NT",), ("mxfp8", "nvfp4"))
_CDNA3 = Arch(_FNUZ, True, _ALL_LAYOUTS, (), 64)
_RDNA4 = Arch(_OCP, True, _ALL_LAYOUTS, (), 32)

ARCHS: dict[str, dict[str, Arch]] = {
    "nvidia": {
        "sm_70": Arch(),
        "sm_75": Arch(),
        "sm_80": Arch(),
        "sm_86": Arch(),
        "sm_87": Arch(),
        "sm_89": _HOPPER,
        "sm_90": _HOPPER,
        "sm_100": _BLACKWELL,
        "sm_103": _BLACKWELL,
        "sm_120": _CONSUMER_BLACKWELL,
        "sm_121": _CONSUMER_BLACKWELL,
    },
    "amd": {
        "gfx90a": Arch(warp_size=64),
        "gfx940": _CDNA3,
        "gfx941": _CDNA3,
        "gfx942": _CDNA3,
        "gfx950": Arch(_OCP, True, _ALL_LAYOUTS, ("mxfp8",), 64),
        "gfx1100": Arch(warp_size=32),
        "gfx1101": Arch(warp_size=32),
        "gfx1102": Arch(warp_size=32),
        "gfx1200": _RDNA4,
        "gfx1201": _RDNA4,
    },
    "cpu": {"cpu": Arch(warp_size=1)},
    "intel": {"xpu": Arch(warp_size=32)},
    "apple": {"mps": Arch(warp_size=32)},
}
