# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Guards: whether tensors have the metadata of earlier ones, that is class, shape, dtype, device and, where asked for,
strides.

Reading these from Python takes some 200 ns a tensor, half of it for shape and device, which are made anew for every
read. PyTorch has the same comparison in native code for torch.compile's guards, at a quarter of that. It compares a
little more (requires_grad, autograd's state), which costs a second entry and never gives a wrong answer. It is not
public, so a PyTorch without it, or with another signature, gets the comparison from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.torch_private import TensorGuards

Guard = Callable[..., bool]

#: Classes of tensors whose metadata says everything about them. Others (fake ones, wrappers) are checked every time.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain(x: Any) -> bool:
    return x.__class__ in PLAIN


def guard_for(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Guard:
    """A function of as many tensors: whether they have the metadata of `tensors`.

    It keeps none of them. An argument that is no tensor fails; given more or fewer arguments, it may raise anything.

    Args:
        strides: for each tensor, whether strides must be equal too.
    """
    if not tensors:
        return _none_given
    return _natively(tensors, strides) or _from_python(tensors, strides)


def _none_given(*tensors: torch.Tensor) -> bool:
    return not tensors


def _natively(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Guard | None:
    if TensorGuards is None:
        return None
    fixed = [list(t.stride()) if strict else [None] * t.ndim for t, strict in zip(tensors, strides)]
    sizes = [list(t.shape) for t in tensors]
    try:
        found: Guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=fixed).check
        return found if found(*tensors) is True else None
    except (TypeError, AttributeError):
        return None


def _from_python(tensors: Sequence[torch.Tensor], strides: Sequence[bool]) -> Guard:
    def metadata(found: Sequence[torch.Tensor]) -> list[Any]:
        return [
            (t.__class__, t.shape, t.dtype, t.device, t.stride() if strict else None)
            for t, strict in zip(found, strides)
        ]

    expected = metadata(tensors)
    return lambda *found: (
        len(found) == len(expected) and all(isinstance(t, torch.Tensor) for t in found) and metadata(found) == expected
    )
