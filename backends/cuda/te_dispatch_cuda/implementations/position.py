# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the position family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import Compare
from te_dispatch_cuda.implementations.native import ROWS, kernel

# csrc/position/rope.h: kMostRotated.
_TABLE = (Compare("rotary_dim", "<=", 4096),)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("rope_fwd", "position:rope_fwd", _TABLE, ROWS),
    kernel("rope_bwd", "position:rope_bwd", _TABLE, ROWS),
)
