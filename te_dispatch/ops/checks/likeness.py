# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether tensors look like earlier ones: class, shape, dtype, device and, where asked for, strides.

Reading these from Python takes some 200 ns a tensor, half of it for shape and device, which are made anew for every
read. PyTorch has the same comparison in native code for torch.compile's guards, at a quarter of that. It tells a little
more apart (requires_grad, autograd's state), which costs a second entry and never a wrong answer. It is not public,
so a PyTorch without it, or with another signature, gets the comparison from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.torch_private import TensorGuards

Likeness = Callable[..., bool]

#: Classes of tensors whose looks say everything about them. Others (fake ones, wrappers) are looked into every time.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def alike(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Likeness:
    """A function of as many tensors: whether they look like `tensors`, where `strides` says so with equal strides.

    It keeps none of them. What is no tensor looks like none; given more or fewer, it may raise whatever it likes.
    """
    if not tensors:
        return _none_given
    return _natively(tensors, strides) or _from_python(tensors, strides)


def _none_given(*tensors: torch.Tensor) -> bool:
    return not tensors


def _natively(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Likeness | None:
    if TensorGuards is None:
        return None
    fixed = [list(t.stride()) if strict else [None] * t.ndim for t, strict in zip(tensors, strides)]
    sizes = [list(t.shape) for t in tensors]
    try:
        found: Likeness = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=fixed).check
        return found if found(*tensors) is True else None
    except (TypeError, AttributeError):
        return None


def _from_python(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Likeness:
    def look(found: Sequence[torch.Tensor]) -> list[Any]:
        return [
            (t.__class__, t.shape, t.dtype, t.device, t.stride() if strict else None)
            for t, strict in zip(found, strides)
        ]

    expected = look(tensors)
    return lambda *found: (
        len(found) == len(expected) and all(isinstance(t, torch.Tensor) for t in found) and look(found) == expected
    )
