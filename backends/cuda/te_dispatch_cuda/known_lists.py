# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists of tensors that an operator has met: an optimizer makes the same step again and again.

Lists that look alike (class, dtype, device, shape and strides of every tensor) passed the operator's checks once and
need them no more; where they lie is read anew in every call (csrc/training/tensor_lists.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.backend_kit.device import dlpack_exchange
from te_dispatch.ops.checks.guards import PLAIN
from te_dispatch_cuda.native import load

_native = load()
#: Kinds of lists that one operator knows, and those of the same lengths.
_KINDS, _ALIKE = 64, 8
#: What native code reads tensors through; None in a PyTorch without it (before 2.10), where nothing is known.
_EXCHANGE = dlpack_exchange


class Lists:
    """The lists that one operator knows. A list may be None."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: BoundedDict[tuple[Any, ...], tuple[tuple[Any, torch.device], ...]] = BoundedDict(_KINDS)

    def like(self, lists: Sequence[Any]) -> Sequence[tuple[Any, torch.device]]:
        """What is known of lists of these classes and lengths: for native code, which tells whether they look alike,
        and where they lie."""
        try:
            return self._kinds.get(_key(lists), ())
        except TypeError:  # no lists, as checks shall say
            return ()

    def keep(self, lists: Sequence[Any]) -> None:
        """Know lists of dense tensors that passed the operator's checks."""
        tensors = [*chain.from_iterable(filter(None, lists))]
        if _EXCHANGE is None or not PLAIN.issuperset(map(type, tensors)):
            return
        try:
            known = _native.TensorLists(tuple(lists), _EXCHANGE), tensors[0].device
        except ValueError:  # an interface of another version, or what it cannot tell of
            return
        key = _key(lists)
        self._kinds[key] = (known, *self._kinds.get(key, ())[: _ALIKE - 1])


def _key(lists: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(x.__class__, 0 if x is None else len(x)) for x in lists])
