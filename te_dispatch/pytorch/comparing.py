# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Printing and comparing tensors while a program is debugged, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.pytorch.arguments import resolve_device

__all__ = ["all_close", "compare_tensors", "print_rank_0"]


def all_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.allclose` of copies on the CPU, which needs no memory on the device."""
    return torch.allclose(a.cpu(), b.cpu())


def print_rank_0(*args: Any) -> None:
    """`print`, where the current device is the first of its machine, or the CPU."""
    if not resolve_device(None).index:
        print(*args)


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Print both tensors, their largest elements and the largest difference, as `print_rank_0` prints.

    Tensors of different shapes are not compared; that is printed then.
    """
    if a.shape != b.shape:
        print_rank_0(f"The tensors have different shapes: {tuple(a.shape)} and {tuple(b.shape)}")
        return
    print_rank_0(a)
    print_rank_0(b)
    if a.numel():
        print_rank_0(f"largest difference {(a - b).abs().max()}, largest elements {a.max()} and {b.max()}")
