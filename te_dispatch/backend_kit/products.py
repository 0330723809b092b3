# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch's settings of matrix products, and its product of FP8 matrices.

`scaled_mm(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum)` is ``torch._scaled_mm``; `amx_tiles()` whether
PyTorch multiplies 16-bit matrices of the CPU on AMX tiles.
"""

from __future__ import annotations

from te_dispatch.torch_private import amx_tiles as amx_tiles
from te_dispatch.torch_private import fp32_precision
from te_dispatch.torch_private import scaled_mm as scaled_mm


def allows_tf32() -> bool:
    """Whether fp32 products on CUDA devices may round their operands to TF32
    (``torch.set_float32_matmul_precision``)."""
    return fp32_precision("cuda", "matmul") == "tf32"
