# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random operands of a ``gemm`` that is described by facts, for tuners: memory of their own, never a live output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from te_dispatch.ops.shapes import data_shapes, laid_out_shapes

#: Names of plain dtypes as facts have them.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: E8M0 and e4m3fn codes of 1.
_ONES = {"mxfp8": 0x7F, "nvfp4": 0x38}


class Operands(NamedTuple):
    """Of one call; scales of quantized operands, and a bias where the call has one."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    out: torch.Tensor
    bias: torch.Tensor | None

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self if x is not None)


def random_operands(call: Mapping[str, Any], device: torch.device, scale_layout: Callable[[str, str], str]) -> Operands:
    """Operands of a call: quantized ones as codes that are contracted along their last dimension, with scales of 1.

    Args:
        call: facts: ``m``, ``n``, ``k``, ``layout``, and where they are not the defaults ``a.dtype``, ``b.dtype``
            (bf16), ``a.scaling``, ``b.scaling`` (tensor for encodings), ``out_dtype`` (bf16, else a's), ``bias``.
        scale_layout: (operand, scaling) -> the layout in which the library reads its scales.
    """
    m, n, k, layout = call["m"], call["n"], call["k"], call["layout"]
    shapes = ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))
    sides = [_side(call, side, shapes[i], ((m, k), (n, k))[i], device, scale_layout) for i, side in enumerate("ab")]
    kind = call.get("a.dtype", "bf16")
    dtype = DTYPES[call.get("out_dtype") or (kind if kind in DTYPES else "bf16")]
    out = torch.zeros((m, n), dtype=dtype, device=device)
    bias = torch.randn(n, device=device).to(dtype) if call.get("bias") else None
    return Operands(sides[0][0], sides[1][0], sides[0][1], sides[1][1], out, bias)


def _side(
    call: Mapping[str, Any],
    side: str,
    plain: tuple[int, int],
    contracted: tuple[int, int],
    device: torch.device,
    scale_layout: Callable[[str, str], str],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    kind = call.get(f"{side}.dtype", "bf16")
    if kind in DTYPES:
        return torch.randn(plain, device=device).to(DTYPES[kind]), None
    scaling = call.get(f"{side}.scaling", "tensor")
    # Codes of numbers, none of them NaN or Inf: magnitudes below 0x70, any sign. FNUZ has its NaN at -0.
    data = torch.randint(1, 0x70, data_shapes(contracted, scaling)[0], dtype=torch.uint8, device=device)
    data |= torch.randint(0, 2, data.shape, dtype=torch.uint8, device=device) << 7
    laid_out = laid_out_shapes(contracted, scaling, scale_layout(side, scaling))[0]
    if scaling in _ONES:
        return data, torch.full(laid_out, _ONES[scaling], dtype=torch.uint8, device=device)
    return data, torch.ones(laid_out, device=device)
