# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What NVIDIA's chip generations can do, as data. Sources: CUDA C++ Programming Guide, PTX ISA, cuBLASLt's manual."""

from __future__ import annotations

from te_dispatch.core.facts import Arch

_OCP = ("e4m3fn", "e5m2")
# Ada and Hopper multiply FP8 only where both operands are contracted along their last dimension.
_FP8 = Arch(encodings=_OCP, fp8_matmul=True, fp8_layouts=("NT",))
_BLACKWELL = Arch(_OCP, True, ("TN", "NN", "NT"), ("mxfp8", "nvfp4"))
_CONSUMER_BLACKWELL = Arch(_OCP, True, ("NT",), ("mxfp8", "nvfp4"))

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
    }
}
