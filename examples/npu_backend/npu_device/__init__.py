# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The device ``npu`` for PyTorch, and what `torch.npu` offers.

A vendor's extension of PyTorch is larger and has the same parts. te_dispatch calls none of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_registered = False


def register() -> None:
    """Load the native part and name the device. PyTorch calls this when it is imported."""
    global _registered
    if _registered:
        return
    import torch

    library = next(Path(__file__).parent.glob("_device*.so"))
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    _registered = True


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    if getattr(device, "index", device) not in (None, 0):
        raise ValueError(f"device: got {device}, there is npu:0 only")


def synchronize(device: Any = None) -> None:
    """Work is done when it is queued."""


def manual_seed_all(seed: int) -> None:
    """There is no generator on this device."""


def get_amp_supported_dtype() -> list[Any]:
    import torch

    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False
