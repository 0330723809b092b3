# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products. Contracts: `te_dispatch.ops.gemm`.

`gemm` multiplies plain dtypes, `gemm_codes` quantized operands on units of the chip that know them, `gemm_decoded` any
quantized operands. One launch does the product and what follows it; only sums over a dimension that the product does
not have (`dbias`) take more.

fp32 operands are multiplied in fp32, or in TF32 where PyTorch's setting for its own products allows that and the chip
has it (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``).
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.call_plans import OFTEN
from te_dispatch.backend_kit.gemm import gemm_with_epilogue
from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import Epilogue
from te_dispatch.ops.results import Gemm
from te_dispatch_triton.gemm_plans import candidates, force
from te_dispatch_triton.gemm_product import run
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.tape import read

__all__ = ["allows_tf32", "candidates", "force", "gemm", "gemm_codes", "gemm_decoded"]

Operand = torch.Tensor | Quantized


@replayed(bias=OFTEN)
@gemm_with_epilogue
def gemm(a: torch.Tensor, b: torch.Tensor, layout: str, epilogue: Epilogue, split_accumulator: bool | None) -> Gemm:
    """fp32, bf16 and fp16 operands."""
    tf32 = a.dtype is torch.float32 and read(allows_tf32)
    return run(a, b, layout, epilogue, tf32=tf32)


@replayed("gemm", bias=OFTEN)
@gemm_with_epilogue
def gemm_codes(a: Quantized, b: Quantized, layout: str, epilogue: Epilogue, split_accumulator: bool | None) -> Gemm:
    """Quantized operands on the chip's units, through their copies contracted along the last dimension. With one scale
    per tensor the other copy serves too, decoded. `split_accumulator`: `None` accumulates fast; partial sums of blocks
    are always promoted.
    """
    return run(a, b, layout, epilogue, split=bool(split_accumulator))


@replayed("gemm", bias=OFTEN)
@gemm_with_epilogue
def gemm_decoded(a: Quantized, b: Quantized, layout: str, epilogue: Epilogue, split_accumulator: bool | None) -> Gemm:
    """Quantized operands of any encoding and scaling on any chip: decoded by the kernel, multiplied in 16 bits (which
    hold the codes exactly) and summed in fp32, as `split_accumulator` would.
    """
    return run(a, b, layout, epilogue, decoded=True)
