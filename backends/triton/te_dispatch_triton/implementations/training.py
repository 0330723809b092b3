# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the training family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch_triton.implementations.entry import ROWS, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    # Element i of a call has word i of the random stream, whatever the number of rows.
    kernel("dropout_add_fwd", "training:dropout_add_fwd", claims=ROWS),
    kernel("dropout_add_bwd", "training:dropout_add_bwd", claims=ROWS),
    kernel("multi_tensor_adam", "training:multi_tensor_adam", plan=None),
    kernel("multi_tensor_l2norm", "training:multi_tensor_l2norm", plan=None),
    kernel("multi_tensor_scale", "training:multi_tensor_scale", plan=None),
    kernel("moe_permute", "training:moe_permute"),
    kernel("moe_unpermute", "training:moe_unpermute", claims=ROWS),
    kernel("moe_unpermute_bwd", "training:moe_unpermute_bwd"),
)
