# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of arguments other than plain tensors the code of signatures reads (`signatures`): facts, which are hashed, and
tensors, whose metadata is compared.

Each function raises TypeError, or anything else, for an object of a class that it does not know: signatures do not
cover such a call.
"""

from __future__ import annotations

import itertools
from math import copysign
from typing import Any

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.checks.guards import PLAIN

#: Quantizers of which checks read nothing but the encoding.
_OF_ENCODING = frozenset(
    (MXFP8Quantizer, MXFP8TileQuantizer, NVFP4Quantizer, NVFP4HadamardQuantizer, NVFP4FourOverSixQuantizer)
)


def read_record(r: Any) -> tuple[Any, tuple[Any, ...]]:
    """Facts and tensors of a `Quantized`: those that belong to a copy that is there."""
    if r.__class__ is not Quantized:
        raise TypeError("other classes are looked at every time")
    row, column, scale, whole = r.row_data, r.col_data, r.row_scale_inv, r.global_scale_inv
    tensors: tuple[Any, ...]
    if column is None:
        copies, tensors = "row", (row, scale)
    elif row is None:
        copies, tensors = "column", (column, r.col_scale_inv)
    elif r.col_scale_inv is scale:
        copies, tensors = "both, one scale", (row, column, scale)
    else:
        copies, tensors = "both", (row, column, scale, r.col_scale_inv)
    if whole is not None:
        copies, tensors = copies + ", global scale", (*tensors, whole)
    return (copies, r.encoding, r.scaling, r.scale_layout, r.shape, r.dtype, r.device), tensors


def read_quantizer(q: Any) -> tuple[Any, tuple[Any, ...]]:
    """Facts and tensors of a quantizer."""
    kind = q.__class__
    if kind is DelayedQuantizer:
        amax = q.amax
        return (kind, q.encoding, amax is None), (q.scale,) if amax is None else (q.scale, amax)
    if kind is CurrentQuantizer:
        return (kind, q.encoding, q.epsilon.__class__, q.epsilon), ()
    if kind is BlockQuantizer:
        return (kind, q.encoding, q.epsilon.__class__, q.epsilon, q.two_d, q.scale_layout), ()
    if kind in _OF_ENCODING:
        return (kind, q.encoding), ()
    raise TypeError("other classes are looked at every time")


def read_exact_quantizer(q: Any) -> tuple[Any, tuple[Any, ...]]:
    """The same, with all that a cast may depend on."""
    kind = q.__class__
    if kind is DelayedQuantizer:
        amax = q.amax
        return (kind, q.encoding, q.common, amax is None), (q.scale,) if amax is None else (q.scale, amax)
    if kind is CurrentQuantizer:
        epsilon = q.epsilon
        return (kind, q.encoding, q.common, q.power_of_two, epsilon.__class__, epsilon, copysign(1.0, epsilon)), ()
    if kind is BlockQuantizer:
        epsilon = q.epsilon
        how = q.two_d, q.scale_layout, q.power_of_two, epsilon.__class__, epsilon, copysign(1.0, epsilon)
        return (kind, q.encoding, q.common, *how), ()
    if kind in _OF_ENCODING:
        return (kind, *vars(q).values()), ()
    raise TypeError("other classes are looked at every time")


def read_exact_numbers(values: Any) -> Any:
    return None if values is None else (read_numbers(values), repr(values))


def read_numbers(values: Any) -> Any:
    return values.__class__, *values, *map(type, values)


def read_number_lists(lists: Any) -> Any:
    numbers = [*itertools.chain.from_iterable(lists)]
    return lists.__class__, *map(len, lists), *numbers, *_classes(lists), *_classes(numbers)


def _classes(values: Any) -> Any:
    """The class of each value, or the one that they all have: 1, 1.0 and True are equal."""
    found = {*map(type, values)}
    return found if len(found) == 1 else map(type, values)


def read_operands(xs: Any) -> tuple[Any, tuple[Any, ...]]:
    """Facts and tensors of a list of tensors and records. The shape of the first is among the facts."""
    if len(xs) == 0 or PLAIN.issuperset(map(type, xs)):
        return (xs.__class__, len(xs), xs[0].shape if xs else None), tuple(xs)
    facts: list[Any] = [xs.__class__, xs[0].shape]
    tensors: list[Any] = []
    for x in xs:
        tags, parts = (True, (x,)) if x.__class__ in PLAIN else read_record(x)
        facts.append(tags)
        tensors += parts
    return tuple(facts), tuple(tensors)


def read_quantizers(qs: Any) -> tuple[Any, tuple[Any, ...]]:
    """Facts and tensors of a list of quantizers, with all that casts may depend on."""
    facts, tensors = zip(*map(read_exact_quantizer, qs)) if qs else ((), ())
    return (qs.__class__, *facts), (*itertools.chain.from_iterable(tensors),)


def read_splits(x: Any) -> tuple[Any, tuple[Any, ...]]:
    if x is None or x.__class__ in PLAIN:
        return (x is None, () if x is None else (x,))
    if x.__class__ is not list and x.__class__ is not tuple:
        raise TypeError("other classes are looked at every time")
    return read_numbers(x), ()


def read_saved(x: Any) -> tuple[Any, tuple[Any, ...]]:
    tensors = x.tensors
    return (
        (x.implementation, x.format, x.options, *[t is None for t in tensors]),
        tuple([t for t in tensors if t is not None]),
    )
