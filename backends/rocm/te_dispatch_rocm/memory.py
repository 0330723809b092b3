# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Between PyTorch's tensors and native calls: addresses, the device's index and stream, contiguous operands.

Every native call takes addresses, sizes and a stream. Outputs and workspace come from `te_dispatch.ops.alloc` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dispatch.backend_kit.device import raw_stream
from te_dispatch.ops import alloc
from te_dispatch_rocm.probe import on_host

empty = alloc.empty

#: What operands begin at multiples of, in bytes: the library's kernels read so many at once, and nothing tells it what
#: an address is a multiple of.
ALIGNED = 16


def place_of(x: torch.Tensor) -> tuple[int, Callable[[int], int]]:
    """HIP's index of the device that a tensor is on, and what gives the address of PyTorch's current stream there.

    A tensor of the CPU is on device 0, which works on the host's memory (`te_dispatch_rocm.probe.on_host`), without
    streams: dispatch sends none here where that is not so.
    """
    if x.device.type == "cpu":
        return 0, _no_stream
    return x.get_device(), raw_stream


def device_of(index: int) -> torch.device:
    """PyTorch's device of HIP's index: the CPU where HIP works on the host's memory."""
    return torch.device("cpu") if on_host() else torch.device("cuda", index)


def _no_stream(index: int) -> int:
    return 0


def address(x: torch.Tensor | None) -> int:
    """0 for an absent tensor."""
    return 0 if x is None else x.data_ptr()


def usable(x: torch.Tensor) -> torch.Tensor:
    """x where it is contiguous and aligned, else a copy in a workspace."""
    if x.is_contiguous() and not x.data_ptr() % ALIGNED:
        return x
    return empty("workspace", tuple(x.shape), x.dtype, x.device).copy_(x.detach())


def usable_or_none(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else usable(x)
