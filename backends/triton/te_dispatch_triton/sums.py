# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Column sums in two stages: partial ones of tiles in a workspace, then their sums, in an order that sizes fix."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch_triton import configs
from te_dispatch_triton.kernels.cast import sum_columns
from te_dispatch_triton.launch import Kernel
from te_dispatch_triton.memory import empty
from te_dispatch_triton.targets import INTERPRETER, target_of

_sum = Kernel(sum_columns)


def workspace(tiles: int, columns: int, device: torch.device) -> torch.Tensor:
    """For partial sums of `tiles` tile rows (`kernels.tile.put_sums`); an empty tensor's one program writes a row."""
    return empty("workspace", (tiles or 1, columns), torch.float32, device)


@cached()
def _choice(device: torch.device, tiles: int) -> configs.Choice:
    return configs.choose("quantize", "sums", target_of(device), tiles=tiles)


def finish(partial: torch.Tensor, tiles: int, target: torch.Tensor) -> None:
    """target (columns,), of any float dtype: the sums of the columns of partial (tiles, columns), rounded once."""
    columns = target.shape[0]
    if columns == 0:
        return
    choice = _choice(target.device, tiles)
    width = choice.constants["BN"]
    _sum(
        target.device, (-(-columns // width), 1, 1), (partial, tiles, columns, target),
        (target_of(target.device) is INTERPRETER, choice.constants["BR"], width), choice.config,
    )  # fmt: skip
