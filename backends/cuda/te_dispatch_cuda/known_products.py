# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products that were made before: a model makes the same ones in every step.

A contract's checks and the key of a prepared call read much the same of a call, one after the other, in a third of the
time that the library takes. So usual products, of two operands and perhaps a bias into memory of their own, are looked
for here first: under options and tags of the operands, and by how the tensors look that are read (class, shape,
strides, dtype, device). Only products that passed the checks are here.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.ops.checks.guards import PLAIN, guard_for
from te_dispatch_cuda.gemm_plans import CALLS
from te_dispatch_cuda.gemm_repeated import copies

#: Kinds of products that one operator knows by name, and those of the same name.
_KINDS, _ALIKE = 1024, 8

#: A product as it is looked for: its name, what is read, and that as a prepared call takes it. In a name 0.0 and -0.0
#: would be equal.
Kind = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def of_tensors(a: Any, b: Any, layout: Any, alpha: Any, accumulate: Any, bias: Any, out_dtype: Any) -> Kind | None:
    """None where no such product is known; whether one of fp32 may use TF32 is asked at every call."""
    try:
        dtype = a.dtype
        if dtype is torch.float32:
            return None
        low, tensors = (-1, (a, b)) if bias is None else (bias.data_ptr() & 15, (a, b, bias))
        name = (layout, alpha or str(alpha), accumulate, out_dtype or dtype, low, a.shape, b.shape)
        return name, tensors, (a, b, None, None, bias, None)
    except Exception:  # the checks shall say what is wrong
        return None


def of_records(
    a: Any, b: Any, layout: Any, alpha: Any, accumulate: Any, bias: Any, out_dtype: Any, split_accumulator: Any
) -> Kind | None:
    """None where no such product is known; those of fp4 are not."""
    try:
        if a.global_scale_inv is not None:
            return None
        a_data, a_scale, b_data, b_scale = copies(a, b, layout)
        low = -1 if bias is None else bias.data_ptr() & 15
        name = (
            layout, alpha or str(alpha), accumulate, out_dtype or a.dtype, low, split_accumulator,
            a.shape, a.encoding, a.scaling, a.scale_layout, b.shape, b.encoding, b.scaling, b.scale_layout,
        )  # fmt: skip
        tensors = (a_data, b_data, a_scale, b_scale)
        return name, tensors if bias is None else (*tensors, bias), (*tensors, bias, None)
    except Exception:  # the checks shall say what is wrong
        return None


class Products:
    """Prepared calls of one operator, each of operands without gaps."""

    __slots__ = ("_generation", "_known")

    def __init__(self) -> None:
        self._generation, self._known = CALLS.generation, BoundedDict[Any, list[tuple[Any, Any]]](_KINDS)

    def again(self, kind: Kind) -> Any:
        """The result of a product that is known; None where it is not, or where an address is less aligned."""
        if self._generation != CALLS.generation:
            self._generation, self._known = CALLS.generation, BoundedDict(_KINDS)
        name, tensors, operands = kind
        call = None
        try:
            for looks, made in self._known[name]:
                if looks(*tensors):
                    call = made
                    break
        except Exception:  # not known, or no name
            return None
        return None if call is None else call(*operands)

    def keep(self, kind: Kind, call: Any) -> None:
        """Remember what made a product, unless it was of other tensors than it was given."""
        name, tensors, _ = kind
        if not all(x.__class__ in PLAIN and x.is_contiguous() for x in tensors):
            return
        self._known[name] = [
            (guard_for(tensors, [True] * len(tensors)), call),
            *self._known.get(name, ())[: _ALIKE - 1],
        ]
