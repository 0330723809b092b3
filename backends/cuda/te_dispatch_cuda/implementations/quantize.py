# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the quantize family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import OneOf
from te_dispatch_cuda.implementations.native import CASTS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("quantize", "quantize:quantize", (OneOf("rng_state", False), *CASTS), plan="quantize:plan_quantize"),
    kernel("quantize_dbias", "quantize:quantize_dbias", CASTS, plan="quantize:quantize_dbias.plans.repeat"),
    kernel("compute_amax", "quantize:compute_amax"),
    kernel("update_delayed_scales", "quantize:update_delayed_scales", plan="quantize:plan_update_delayed_scales"),
)
