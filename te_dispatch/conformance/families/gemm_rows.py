# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The first rows of a product, of plain operands and of records: what `batch_invariant` compares."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.conformance.space import Arguments
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized

#: Scalings whose scales go along with rows.
_ROW_SCALES = ("block_1d", "mxfp8")


def half(arguments: Arguments) -> Arguments:
    """A product's first half of the rows. The same arguments where they cannot be cut: a cast of the result shares
    scales among rows, and so do other scalings of a."""
    if arguments.get("out_quantizer") is not None or arguments.get("aux_quantizer") is not None:
        return arguments
    a, transposed = arguments["a"], arguments["layout"][0] == "T"
    rows = (a.shape[-1] if transposed else a.shape[0]) // 2
    cut: Any = _record(a, rows, transposed) if isinstance(a, Quantized) else (a[..., :rows] if transposed else a[:rows])
    if cut is None:
        return arguments
    changed = {**arguments, "a": cut}
    for name in ("out", "aux"):
        if isinstance(arguments.get(name), torch.Tensor):
            changed[name] = arguments[name][:rows]
    return changed


def _record(x: Quantized, rows: int, transposed: bool) -> Quantized | None:
    """The first rows of the output: of x, or of its columns where it is transposed."""
    if len(x.shape) != 2 or x.scale_layout != CANONICAL_SCALES:
        return None
    row_scale = x.row_scale_inv
    if x.scaling in _ROW_SCALES and not transposed and x.col_data is None and row_scale is not None:
        row_scale = row_scale[:rows]
    elif x.scaling != "tensor":
        return None
    across, along = (x.row_data, x.col_data) if transposed else (x.col_data, x.row_data)
    across = None if across is None else across[:, :rows].contiguous()
    along = None if along is None else along[:rows]
    row_data, col_data = (across, along) if transposed else (along, across)
    shape = (x.shape[0], rows) if transposed else (rows, x.shape[1])
    return Quantized(
        row_data, col_data, row_scale, x.col_scale_inv, x.encoding, x.scaling, x.scale_layout, shape, x.dtype, x.device,
        x.global_scale_inv,
    )  # fmt: skip
