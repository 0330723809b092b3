# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""NVFP4 whose blocks choose between maxima of 4 and 6. Contract: `NVFP4FourOverSixQuantizer`.

The product of a code and its block's scale is exact, so an error has the same bits whether a compiler contracts the
product and the difference or not.
"""

from __future__ import annotations

import torch

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantizers import NVFP4FourOverSixQuantizer
from te_dispatch.ops.shapes import ceil_div
from te_dispatch_torch.blocks import Parts, as_matrix, nvfp4_scale, tiled
from te_dispatch_torch.encodings import decode, e2m1_values, encode_, pack_e2m1
from te_dispatch_torch.scaling import amax_of, block_amax


def cast(
    x: torch.Tensor, quantizer: NVFP4FourOverSixQuantizer, usage: str, amax: torch.Tensor | None
) -> tuple[Parts, torch.Tensor]:
    """The parts and global_scale_inv."""
    matrix = as_matrix(x)
    scale = nvfp4_scale(amax_of(x) if amax is None else amax, float(quantizer.scale_max))
    row, column, row_scale, col_scale = None, None, None, None
    codes = block = None
    if usage != "column" or quantizer.two_d:
        codes, block = _chosen(matrix, scale, quantizer)
        row, row_scale = (
            pack_e2m1(codes).view(*x.shape[:-1], ceil_div(x.shape[-1], 2)),
            _per_row(block, codes, quantizer),
        )
    if usage != "row":
        if quantizer.two_d and codes is not None and block is not None:
            codes, block = codes.t().contiguous(), block.t()
        else:
            codes, block = _chosen(matrix.t().contiguous(), scale, quantizer)
        column, col_scale = pack_e2m1(codes), _per_row(block, codes, quantizer)
    return (row, column, row_scale, col_scale), scale.reciprocal()


def _per_row(block: torch.Tensor, codes: torch.Tensor, quantizer: NVFP4FourOverSixQuantizer) -> torch.Tensor:
    wide = block.repeat_interleave(16, 0)[: codes.shape[0]] if quantizer.two_d else block
    return wide.contiguous()


def _chosen(
    x: torch.Tensor, scale: torch.Tensor, quantizer: NVFP4FourOverSixQuantizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (R, C), one a byte, and the scale of each block."""
    rows = 16 if quantizer.two_d else 1
    tiles = tiled(x, rows, 16)
    scaled = tiles * scale
    amax = block_amax(tiles, (1, 3))
    six = amax * scale / torch.full_like(amax, ENCODINGS["e2m1"].max)
    (codes6, block6, error6), (codes4, block4, error4) = (
        _candidate(scaled, wanted, quantizer) for wanted in (six, six * 1.5)
    )
    four = error4 < error6
    codes = torch.where(four, codes4, codes6).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    return codes.contiguous(), torch.where(four, block4, block6).squeeze(3).squeeze(1)


def _candidate(
    scaled: torch.Tensor, wanted: torch.Tensor, quantizer: NVFP4FourOverSixQuantizer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales of blocks, and the sums of their errors."""
    block = encode_(wanted, "e4m3fn", ENCODINGS["e4m3fn"].max, True)
    divisor = decode(block, "e4m3fn")
    quotient = torch.where(divisor == 0, 0.0, scaled / divisor)
    codes = encode_(quotient, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero)
    error = e2m1_values(codes) * divisor - scaled
    error = error.abs() if quantizer.error == "MAE" else error * error
    return codes, block, _halves(_halves(error, 3), 1)


def _halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums along a dimension, a power of two long, of halves until one element is left."""
    while x.shape[dim] > 1:
        first, second = x.chunk(2, dim)
        x = first + second
    return x
