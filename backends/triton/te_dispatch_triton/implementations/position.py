# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the position family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_triton.implementations.entry import ROWS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("rope_fwd", "position:rope_fwd", claims=ROWS),
    kernel("rope_bwd", "position:rope_bwd", claims=ROWS),
)
