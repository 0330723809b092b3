# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products of FP8 operands with scales of blocks, on AITER, where it is installed. Contract: `te_dispatch.ops.gemm`.

AITER multiplies rows with scales of 128 values by columns with scales of 128 x 128, in the chip's own encoding of
e4m3, and knows no bias, epilogue, accumulation or result in float32: the manifest keeps these away.
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.gemm import gemm_with_epilogue
from te_dispatch.core.autograd import below_autograd
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.gemm import Epilogue, gemm_sizes
from te_dispatch.ops.results import Gemm
from te_dispatch_rocm import aiter
from te_dispatch_rocm.memory import usable

_RESULTS = (torch.bfloat16, torch.float16)
_TYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


@gemm_with_epilogue
@below_autograd
def gemm(a: Quantized, b: Quantized, layout: str, epilogue: Epilogue, split_accumulator: bool | None) -> Gemm:
    """a with blocks of 1 x 128, b with blocks of 128 x 128, in any layout: the copies that are contracted along their
    last dimension."""
    m, n, k = gemm_sizes(a, b, layout)
    if 0 in (m, n, k):
        raise Declined("AITER multiplies matrices that have elements")
    if epilogue.dtype not in _RESULTS:
        raise Declined(f"AITER gives results in bfloat16 and float16, not in {epilogue.dtype}")
    (rows, row_scales), (columns, column_scales) = _copy("a", a, layout[0] == "T"), _copy("b", b, layout[1] == "N")
    made = aiter.multiply_blocks(rows.view(m, k), columns.view(n, k), row_scales, column_scales, epilogue.dtype)
    made = made.view(epilogue.shape)
    return Gemm(made if epilogue.out is None else epilogue.out.copy_(made), None, None)


def _copy(name: str, x: Quantized, rows_contracted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the copy that is contracted along its last dimension."""
    if x.scale_layout != CANONICAL_SCALES:
        raise Declined(f"{name} has scales in layout {x.scale_layout}, which AITER does not read")
    data, scale = (x.col_data, x.col_scale_inv) if rows_contracted else (x.row_data, x.row_scale_inv)
    if data is None or scale is None:
        raise Declined(f"{name} has no {'column' if rows_contracted else 'row'}-wise copy")
    return usable(data).view(_TYPES[x.encoding]), usable(scale)
