# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""max |x| of a tensor: partial maxima, which a following cast reduces by itself, and `compute_amax`."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_triton import configs
from te_dispatch_triton.kernels import amax as kernels
from te_dispatch_triton.launch import Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import target_of

_line, _rows, _fold = Kernel(kernels.maxima_line), Kernel(kernels.maxima_rows), Kernel(kernels.fold_maxima)
#: Blocks of a line that one program still takes alone: a launch that its reader would wait for is saved nothing else.
_ALONE = 4


@cached()
def _choice(device: torch.device, kernel: str) -> configs.Choice:
    return configs.choose("quantize", kernel, target_of(device))


def find_maxima(
    x: torch.Tensor, rows: int, columns: int, noop_flag: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """Partial maxima of |x|, and how many: 1, or a power of two that the chip fixes.

    Args:
        x: contiguous, or 2-dimensional and dense in its rows, of `rows` by `columns` elements.
        noop_flag: nonzero writes nothing.
    """
    device = x.device
    if not x.is_contiguous():
        choice = _choice(device, "maxima_rows")
        c = choice.constants
        count = 1 if rows * columns <= _ALONE * c["BM"] * c["BN"] else c["COUNT"]
        maxima = empty("workspace", (count,), torch.float32, device)
        _rows(
            device, (count, 1, 1), (x, x.stride(0), rows, columns, maxima, noop_flag), (c["BM"], c["BN"]), choice.config
        )
        return maxima, count
    count = _count(x)
    maxima = empty("workspace", (count,), torch.float32, device)
    _find(x, maxima, count, noop_flag)
    return maxima, count


def _count(x: torch.Tensor) -> int:
    c = _choice(x.device, "maxima").constants
    count: int = c["COUNT"]
    return 1 if x.numel() <= _ALONE * c["BLOCK"] else count


def _find(x: torch.Tensor, maxima: torch.Tensor, count: int, noop_flag: torch.Tensor | None) -> None:
    choice = _choice(x.device, "maxima")
    _line(x.device, (count, 1, 1), (x, x.numel(), maxima, noop_flag), (choice.constants["BLOCK"],), choice.config)


@replayed()
def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,)."""
    checks.compute_amax(x, out)
    x = dense(x)
    if out is None:
        out = empty("out", (1,), torch.float32, x.device)
    count = _count(x)
    maxima = out if count == 1 else empty("workspace", (count,), torch.float32, x.device)
    _find(x, maxima, count, None)
    if count > 1:
        _fold(x.device, (1, 1, 1), (maxima, out), (count,), _choice(x.device, "maxima").config)
    return out
