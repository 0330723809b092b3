# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the softmax family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_triton.implementations.entry import ROWS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("softmax_fwd", "softmax:softmax_fwd", claims=ROWS),
    kernel("softmax_bwd", "softmax:softmax_bwd", claims=ROWS),
)
