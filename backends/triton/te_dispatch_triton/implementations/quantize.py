# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the quantize family: casts and the bookkeeping of scales."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import OneOf
from te_dispatch_triton.implementations.entry import CASTS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("quantize", "quantize:quantize", (OneOf("rng_state", False), *CASTS), plan="quantize:plan_quantize"),
    kernel("quantize_dbias", "quantize:quantize_dbias", CASTS),
    kernel("compute_amax", "quantize:compute_amax"),
    kernel("update_delayed_scales", "scales:update_delayed_scales", plan="scales:plan_update"),
)
