# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Have the device "cuda" mean the CPU, for tests that name it on a machine without one.

Functions of PyTorch that take a device are replaced by ones that take "cuda" for "cpu". `torch.cuda.is_available` and
what describes a GPU stay as they are, so that te_dispatch sees the machine that it runs on; streams and graphs raise
as PyTorch has them raise, and so do figures of memory, which PyTorch gives as zeros. The versions that tests ask
Transformer Engine for while they are imported, and that raise without a GPU, are zeros.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from te_dispatch.compat.face import FACE

_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")

_MEMORY = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")

_VERSIONS = {"get_device_compute_capability": (0, 0), "get_cudnn_version": (0, 0, 0)}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)  # an index of the current accelerator


def _with_cpu(function: Callable[..., Any], device_at: int | None = None) -> Callable[..., Any]:
    """`function` with "cuda" replaced in the keyword `device`, and in the positional argument `device_at`."""

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if device_at is not None and len(args) > device_at and _is_cuda(args[device_at]):
            args = (*args[:device_at], "cpu", *args[device_at + 1 :])
        return function(*args, **kwargs)

    return replaced


def _no_memory(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a figure of a GPU's memory requires CUDA support")  # words of `outcomes._NO_CUDA`


def install() -> None:
    """Replace the functions, for the rest of the process."""
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _with_cpu(getattr(torch.Tensor, name), 1 if name == "to" else None))
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "manual_seed": torch.default_generator.manual_seed,  # torch.manual_seed would call manual_seed_all
        "manual_seed_all": torch.default_generator.manual_seed,
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "synchronize": lambda device=None: None,
        **dict.fromkeys(_MEMORY, _no_memory),
    }
    for name, function in replacements.items():
        setattr(torch.cuda, name, function)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    _autocast()
    for module, names in FACE.items():
        for name in _VERSIONS.keys() & names.keys():
            setattr(importlib.import_module(module), name, functools.partial(_VERSIONS.get, name))


def _autocast() -> None:
    constructor = torch.autocast.__init__

    @functools.wraps(constructor)
    def of_the_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        constructor(self, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    torch.autocast.__init__ = of_the_cpu  # type: ignore[method-assign]
