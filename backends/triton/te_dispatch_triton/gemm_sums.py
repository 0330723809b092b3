# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Sums beside a product: over the rows of an output, and over the contracted dimension of an operand.

In two stages through the workspace, in an order that shapes alone decide.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_triton.kernels import cast
from te_dispatch_triton.kernels import gemm as kernels
from te_dispatch_triton.launch import Config, Kernel, blocks
from te_dispatch_triton.memory import empty
from te_dispatch_triton.targets import INTERPRETER, target_of

_SUM_COLUMNS, _OPERAND_SUMS = Kernel(cast.sum_columns), Kernel(kernels.operand_sums)
#: Rows that one program adds up, a step's rows, and columns of a program.
_SPAN, _ROWS, _COLUMNS = 256, 32, 128
_TOTAL_ROWS, _TOTAL_COLUMNS = 32, 64
_CONFIG = Config(num_warps=4, num_stages=2)


def column_sums(partial: torch.Tensor, target: torch.Tensor) -> None:
    """target[n] = the sum of partial[:, n], rounded once. partial: fp32 (count, N)."""
    count, columns = partial.shape
    if columns == 0:
        return
    device = partial.device
    interpreted = target_of(device) is INTERPRETER
    width = 1024 if interpreted else _TOTAL_COLUMNS
    _SUM_COLUMNS(
        device, (blocks(columns, width), 1, 1), (partial, count, columns, target),
        (interpreted, _TOTAL_ROWS, width), _CONFIG,
    )  # fmt: skip


def dbias_of(side: Any, k: int, size: int, scaling: str, dtype: torch.dtype) -> torch.Tensor:
    """(size,): an operand's sums over k.

    Args:
        side: the operand as it is multiplied.
    """
    device = side.data.device
    interpreted = target_of(device) is INTERPRETER
    span, rows, columns = (1024, 256, 1024) if interpreted else (_SPAN, _ROWS, _COLUMNS)
    total = empty("dbias", (size,), dtype, device)
    partial = empty("workspace", (blocks(k, span), size), torch.float32, device)
    if k and size:
        # The matrix (k, size): stored as such, or turned where the operand's rows run along K.
        _OPERAND_SUMS(
            device, (blocks(size, columns), blocks(k, span), 1),
            (side.data, side.scale, partial, k, size, side.stride),
            (side.code, scaling, side.tiles, not side.along_k, rows, columns, span), _CONFIG,
        )  # fmt: skip
    column_sums(partial, total)
    return total
