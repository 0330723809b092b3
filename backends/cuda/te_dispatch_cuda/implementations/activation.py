# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the activation family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_cuda.implementations.native import CASTS, UNROTATED_RECORD, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel(
        "activation_fwd",
        "activation:activation_fwd",
        (*CASTS, *UNROTATED_RECORD),
        plan="activation:activation_fwd.plans.repeat",
    ),
    kernel("activation_bwd", "activation:activation_bwd", (*CASTS, *UNROTATED_RECORD), plan="activation:plan_backward"),
)
