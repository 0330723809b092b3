# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the norm family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_cuda.implementations.native import CASTS, ROWS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("layernorm_fwd", "norm:layernorm_fwd", CASTS, claims=ROWS, plan="norm:plan_forward"),
    kernel("layernorm_bwd", "norm:layernorm_bwd", plan="norm:plan_backward"),
    kernel("rmsnorm_fwd", "norm:rmsnorm_fwd", CASTS, claims=ROWS, plan="norm:plan_forward"),
    kernel("rmsnorm_bwd", "norm:rmsnorm_bwd", plan="norm:plan_backward"),
)
