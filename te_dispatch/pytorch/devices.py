# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Devices, dtypes and process groups that arguments leave open, and facts of the current GPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from te_dispatch.pytorch.arguments import resolve_device

__all__ = [
    "TORCH_MAJOR",
    "TORCH_MINOR",
    "canonicalize_device",
    "canonicalize_dtype",
    "canonicalize_process_group",
    "devices_match",
    "get_sm_count",
    "gpu_autocast_ctx",
    "torch_get_autocast_gpu_dtype",
    "torch_version",
]


def torch_version() -> tuple[int, ...]:
    """The numbers of PyTorch's release, such as (2, 11, 0), without what follows them."""
    release = re.match(r"\d+(\.\d+)*", torch.__version__)
    assert release is not None
    return tuple(int(number) for number in release[0].split("."))


#: Of PyTorch's release.
TORCH_MAJOR, TORCH_MINOR = torch_version()[:2]


def canonicalize_device(device: torch.device | str | int | None) -> torch.device:
    """A device with its index.

    Args:
        device: None for the current accelerator, or the CPU on a machine without one. A kind of accelerator without an
            index stands for its current device.
    """
    found = resolve_device(device)
    if found.index is not None or found.type in ("cpu", "meta"):
        return found
    return torch.device(found.type, torch.get_device_module(found).current_device())


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or PyTorch's default dtype for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def canonicalize_process_group(group: Any) -> Any:
    """`group`, or the default process group for None.

    Raises:
        ValueError: None, and torch.distributed has not been initialized.
    """
    if group is not None:
        return group
    if not torch.distributed.is_initialized():
        raise ValueError("canonicalize_process_group: there is no default group: torch.distributed is not initialized")
    return torch.distributed.group.WORLD


def devices_match(device1: torch.device | str, device2: torch.device | str) -> bool:
    """Whether two devices are the same one; without an index, an accelerator stands for its current device."""
    first, second = torch.device(device1), torch.device(device2)
    if first.type != second.type:
        return False
    if first.index == second.index or first.type == "cpu":
        return True
    return canonicalize_device(first) == canonicalize_device(second)


def get_sm_count() -> int:
    """How many multiprocessors (compute units on AMD) the current GPU has.

    Raises:
        RuntimeError: PyTorch has no CUDA or ROCm device here.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("get_sm_count: PyTorch has no CUDA or ROCm device here")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """The dtype that torch.autocast casts to on a GPU."""
    return torch.get_autocast_dtype("cuda")


#: torch.autocast of a GPU, with the same arguments but the first.
gpu_autocast_ctx = functools.partial(torch.autocast, "cuda")
