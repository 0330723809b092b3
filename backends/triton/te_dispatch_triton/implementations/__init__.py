# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this backend offers, as data: one module per operator family."""

from te_dispatch.core.manifest import Implementation
from te_dispatch_triton.implementations import (
    activation,
    attention,
    gemm,
    norm,
    position,
    quantize,
    quantize_forms,
    softmax,
    training,
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *quantize.IMPLEMENTATIONS,
    *quantize_forms.IMPLEMENTATIONS,
    *gemm.IMPLEMENTATIONS,
    *norm.IMPLEMENTATIONS,
    *activation.IMPLEMENTATIONS,
    *attention.IMPLEMENTATIONS,
    *softmax.IMPLEMENTATIONS,
    *position.IMPLEMENTATIONS,
    *training.IMPLEMENTATIONS,
)
