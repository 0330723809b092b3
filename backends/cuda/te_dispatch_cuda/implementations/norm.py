# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the norm family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_cuda.implementations.native import CASTS, ROWS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("layernorm_fwd", "norm:layernorm_fwd", CASTS, claims=ROWS, plan="norm:layernorm_fwd.plans.repeat"),
    kernel("layernorm_bwd", "norm:layernorm_bwd", plan="norm:layernorm_bwd.plans.repeat"),
    kernel("rmsnorm_fwd", "norm:rmsnorm_fwd", CASTS, claims=ROWS, plan="norm:rmsnorm_fwd.plans.repeat"),
    kernel("rmsnorm_bwd", "norm:rmsnorm_bwd", plan="norm:rmsnorm_bwd.plans.repeat"),
)
