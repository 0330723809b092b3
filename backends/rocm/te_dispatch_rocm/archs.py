# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The chips that this backend serves, as data.

Sources: AMD's "CDNA 2", "CDNA 3", "CDNA 4", "RDNA 3" and "RDNA 4" instruction set manuals: FP8 matrix instructions and
their encodings (FNUZ on gfx942, OCP later), block scales (gfx950), wavefront sizes.
"""

from __future__ import annotations

from te_dispatch.core.facts import Arch

OCP = ("e4m3fn", "e5m2")
FNUZ = ("e4m3fnuz", "e5m2fnuz")
_ALL = ("TN", "NN", "NT")
_RDNA4 = Arch(OCP, True, _ALL, (), 32)

ARCHS: dict[str, dict[str, Arch]] = {
    "amd": {
        "gfx90a": Arch(warp_size=64),
        "gfx942": Arch(FNUZ, True, _ALL, (), 64),
        "gfx950": Arch(OCP, True, _ALL, ("mxfp8",), 64),
        "gfx1100": Arch(warp_size=32),
        "gfx1200": _RDNA4,
        "gfx1201": _RDNA4,
    }
}
