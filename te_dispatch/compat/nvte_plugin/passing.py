# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""When an adapter leaves a call to the native function, and the arguments that adapters read.

An adapter is a Python function with the parameters of the native one. It raises `PassOn`, before anything is written,
where it cannot do what the native function does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: Enumeration member -> dtype. Transformer Engine has two enumerations of dtypes, whose members have the same names.
_DTYPES = {"kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}

#: Enumeration member -> (encoding, largest finite value).
_FP8 = {"kFloat8E4M3": ("e4m3fn", 448.0), "kFloat8E5M2": ("e5m2", 57344.0)}

FLOATS = frozenset(_DTYPES.values())
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class PassOn(Exception):
    """This call is one for the native function; the message says why."""


def require(condition: bool, reason: str) -> None:
    """Raise PassOn(reason) unless the condition holds."""
    if not condition:
        raise PassOn(reason)


def plain(*tensors: Any) -> None:
    """Pass on anything but PyTorch's own tensors: a quantized tensor is a subclass, or no tensor at all."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            raise PassOn(f"a {type(tensor).__name__}")


def floats(*tensors: Any) -> None:
    """Pass on anything but plain tensors of float32, bfloat16 or float16."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            raise PassOn(f"a {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise PassOn(f"a tensor of {tensor.dtype}")


def high_precision(quantizer: Any) -> None:
    """Pass on a call that quantizes its result."""
    if quantizer is not None:
        raise PassOn(f"a {type(quantizer).__name__}")


def torch_dtype(value: Any) -> torch.dtype:
    """The dtype that a member of either enumeration, or a dtype itself, stands for; others are passed on."""
    dtype = value if isinstance(value, torch.dtype) else _DTYPES.get(getattr(value, "name", ""))
    if dtype not in FLOATS:
        raise PassOn(f"the dtype {value!r}")
    return dtype


def fp8_format(value: Any) -> tuple[str, float]:
    """(encoding, largest finite value) of a member of either enumeration; others are passed on.

    The native module runs on NVIDIA devices, whose encodings are OCP's.
    """
    found = _FP8.get(getattr(value, "name", ""))
    if found is None:
        raise PassOn(f"the dtype {value!r}")
    return found


def one_dtype(tensors: Iterable[torch.Tensor]) -> None:
    """Pass on lists whose tensors differ in dtype."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise PassOn("tensors of several dtypes in a list")
