# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax by the compiled kernel. Contract: `te_dispatch.ops.softmax`.

This module is imported when te_dispatch chooses the implementation for the first time. A library that is there and
cannot be loaded fails the import: te_dispatch warns of that and takes the next candidate.
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.call_plans import Planned, launching, planned
from te_dispatch.ops import alloc
from te_dispatch.ops.checks import rows as checks
from te_dispatch_acme import native, probe

_FILE = probe.kernels()
# Without the file the manifest's requirement keeps calls away; doctor, which imports every target, has no complaint.
_LIBRARY = native.load(_FILE) if _FILE else None


@planned()
def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | Planned:
    """fp32 and bf16; the kernel reads operands of any strides where they lie."""
    checks.softmax_fwd(x, mask, scale, out_dtype)
    shape, dtype, device = tuple(x.shape), out_dtype or x.dtype, x.device
    seen = None if mask is None else mask.expand(shape)  # strides of 0, no copy
    codes = native.DTYPES[x.dtype], native.DTYPES[dtype]
    sizes, strides = native.sizes(shape), native.sizes(x.stride())
    mask_strides = None if seen is None else native.sizes(seen.stride())

    def launch(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = alloc.empty("out", shape, dtype, device)
        _LIBRARY.acme_softmax_fwd(
            x.data_ptr(), codes[0], None if mask is None else mask.data_ptr(), y.data_ptr(), codes[1], len(shape),
            sizes, strides, mask_strides, scale, causal,
        )  # fmt: skip
        return y

    return launching(launch, x, mask)
