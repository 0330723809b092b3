# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of an operator's arguments the keys of prepared calls are made of (`prepared`), a kind for every sort.

A kind writes the code that looks at an argument. That code runs with this module's names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import reduce  # noqa: F401  # called by generated code
from itertools import chain
from operator import or_  # noqa: F401
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.core import parameters
from te_dispatch.core.parameters import Member, Parameter
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.checks.guards import PLAIN, Guard, guard_for
from te_dispatch_triton.kinds import AMD, in_reach

_address = torch.Tensor.data_ptr
_SLOTS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


class Kind(NamedTuple):
    """What of an argument ``{x}`` makes a key.

    Attributes:
        facts: code of what is hashed. look: where that takes more, what writes code that leaves it in ``f_{x}``.
        tensors: the argument's tensors, "" for itself; `look` leaves them in ``t_{x}_{name}``, addresses in ``p_``.
    """

    facts: str = ""
    look: Callable[[str], str] | None = None
    tensors: tuple[str, ...] = ()
    #: Whether ``t_{x}_`` and ``p_{x}_`` are lists.
    many: bool = False


_TENSOR = """
if t_{x} is None:
    f_{x} = None
    p_{x} = 0
else:
    p_{x} = t_{x}.data_ptr()
    low |= p_{x}
    index = t_{x}.get_device()
    f_{x} = t_{x}.__class__, t_{x}.shape, t_{x}.dtype, index, t_{x}.is_contiguous() or t_{x}.stride(){reach}
"""
_RECORD = """
if {x}.__class__ is Quantized:
    t_{x}_ = None
    p_{x}_ = 0
    {take}
    {slots}
    f_{x} = (
        {x}.encoding, {x}.scaling, {x}.scale_layout, {x}.shape, {x}.dtype, {x}.device,
        t_{x}_row_scale_inv is t_{x}_col_scale_inv, {facts}
    )
else:
    t_{x}_ = {x}
    {none} = None
    {zero} = 0
    {plain}
    f_{x} = f_{x}_
"""
_QUANTIZER = """
if {x}.__class__ is DelayedQuantizer:
    t_{x}_scale = {x}.scale
    t_{x}_amax = {x}.amax
    {scale}
    {amax}
    f_{x} = {x}.encoding, {x}.common, f_{x}_scale, f_{x}_amax
else:
    t_{x}_scale = t_{x}_amax = None
    p_{x}_scale = p_{x}_amax = 0
    f_{x} = None if {x} is None else _other_quantizer({x})
"""


def _tensor(x: str) -> str:
    return _TENSOR.format(x=x, reach=f", in_reach(t_{x})" if AMD else "")


def _argument(x: str) -> str:
    return f"t_{x}_ = {x}\n" + _tensor(f"{x}_") + f"f_{x} = f_{x}_"


def _record(x: str) -> str:
    slots = [f"{x}_{slot}" for slot in _SLOTS]
    return _RECORD.format(
        x=x,
        take="; ".join(f"t_{x}_{slot} = {x}.{slot}" for slot in _SLOTS),
        slots=indented("\n".join(map(_tensor, slots)), 4),
        facts=", ".join(f"f_{slot}" for slot in slots),
        none=" = ".join(f"t_{slot}" for slot in slots),
        zero=" = ".join(f"p_{slot}" for slot in slots),
        plain=indented(_tensor(f"{x}_"), 4),
    )


def _quantizer(x: str) -> str:
    scale, amax = (indented(_tensor(f"{x}_{name}"), 4) for name in ("scale", "amax"))
    return _QUANTIZER.format(x=x, scale=scale, amax=amax)


def _list(x: str, reader: str) -> str:
    return (
        f"t_{x}_, f_{x} = {reader}({x})\np_{x}_ = [*map(_address, t_{x}_)]\n"
        f"if p_{x}_:\n    low = reduce(or_, p_{x}_, low)\n    index = t_{x}_[0].get_device()"
    )


def _splits(x: str) -> str:
    return (
        f"t_{x}_ = {x} if {x}.__class__ is torch.Tensor else None\n"
        + _tensor(f"{x}_")
        + (f"f_{x} = f_{x}_ or ({x} and ({x}.__class__, *{x}, *map(type, {x})))")
    )


#: By their length, lists that were met twice: what tells whether tensors look like them, and their facts. Reading facts
#: from Python takes ten times as long as that.
_known: BoundedDict[int, list[tuple[Guard, object]]] = BoundedDict(256)
#: What stands for a list's facts in keys: it is hashed at once, where facts are hashed one by one.
_tokens: BoundedDict[tuple[Any, ...], object] = BoundedDict(1024)
#: Lists of one length that are kept.
_ALIKE = 12


def _facts_of(tensors: Sequence[Any]) -> object:
    """Something that is equal for lists whose facts are."""
    known = _known.get(len(tensors), ())
    for looks, token in known:
        if looks(*tensors):
            return token
    facts = tuple([
        (x.__class__, x.shape, x.dtype, x.get_device(), x.is_contiguous() or x.stride()) for x in tensors
    ])  # fmt: skip
    token = _tokens.get(facts)
    if token is not None:
        _known[len(tensors)] = [(guard_for(tensors, [True] * len(tensors)), token), *known[: _ALIKE - 1]]
        return token
    token = _tokens[facts] = object()
    return token


def _operands(xs: Any) -> tuple[list[Any], Any]:
    """The tensors of a list of tensors and records, and facts of all."""
    if xs is None:
        return [], None
    if PLAIN.issuperset(map(type, xs)):
        return list(xs), (xs.__class__, *(map(in_reach, xs) if AMD else ()), _facts_of(xs))
    tensors: list[Any] = []
    tags: list[Any] = [xs.__class__]
    for x in xs:
        if x.__class__ in PLAIN:
            tensors.append(x)
        elif x.__class__ is Quantized:
            parts = [getattr(x, slot) for slot in _SLOTS]
            shared = x.row_scale_inv is x.col_scale_inv
            if shared:
                parts[3] = None
            tags.append((x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device, shared))
            tags += [part is None for part in parts]
            tensors += [part for part in parts if part is not None]
        else:
            raise TypeError("other classes are never prepared")
    facts = [in_reach(x) for x in tensors] if AMD else []
    return tensors, (*tags, *facts, _facts_of(tensors))


def _quantizer_list(qs: Any) -> tuple[list[Any], Any]:
    """The same of a list of quantizers."""
    tensors: list[Any] = []
    tags: list[Any] = [qs.__class__]
    for q in qs:
        if q.__class__ is DelayedQuantizer:
            tags.append((q.encoding, q.common, q.amax is None))
            tensors += (q.scale,) if q.amax is None else (q.scale, q.amax)
        else:
            tags.append(_other_quantizer(q))
    return tensors, (*tags, _facts_of(tensors))


def _number_lists(lists: Any) -> tuple[Any, ...]:
    numbers = [*chain.from_iterable(lists)]
    return lists.__class__, len(lists), *map(type, lists), *map(len, lists), *numbers, *map(type, numbers)


def _other_quantizer(q: Any) -> tuple[Any, ...]:
    """Facts of a quantizer without tensors."""
    kind = q.__class__
    if kind is BlockQuantizer:
        how = q.two_d, q.scale_layout, q.power_of_two, q.epsilon.__class__, q.epsilon
        return kind, q.encoding, q.common, *how
    if kind is CurrentQuantizer:
        return kind, q.encoding, q.common, q.power_of_two, q.epsilon.__class__, q.epsilon
    if kind is MXFP8Quantizer:
        return kind, q.encoding, q.common
    if kind is NVFP4Quantizer:
        return kind, q.encoding, q.common, q.two_d
    raise TypeError("other classes are never prepared")


def indented(text: str, by: int) -> str:
    return text.replace("\n", "\n" + " " * by)


#: A tensor or None.
TENSOR = Kind(look=_argument, tensors=("",))
#: A `Quantized`, a tensor or None.
OPERAND = Kind(look=_record, tensors=("", *_SLOTS))
#: A quantizer or None.
QUANTIZER = Kind(look=_quantizer, tensors=("scale", "amax"))
#: A number or None: 1, 1.0 and True are equal, and not the same to a check; nor are 0.0 and -0.0 to a product.
NUMBER = Kind("{x}.__class__, {x} or {x} is not None and repr({x})")
#: A tuple or list of such, or None.
NUMBERS = Kind("{x} and ({x}.__class__, *{x}, *map(type, {x}))")
#: A word, a flag, a dtype, a tuple of such, None.
OPTION = Kind("{x}")
#: A list or tuple of tensors and records, or None.
OPERANDS = Kind(look=functools.partial(_list, reader="_operands"), tensors=("",), many=True)
#: A list or tuple of quantizers.
QUANTIZERS = Kind(look=functools.partial(_list, reader="_quantizer_list"), tensors=("",), many=True)
#: A list or tuple of lists or tuples of numbers.
NUMBER_LISTS = Kind("_number_lists({x})")
#: A tensor, a list or tuple of numbers, or None.
SPLITS = Kind(look=_splits, tensors=("",))
#: What the host function never looks at.
UNREAD = Kind()

#: By what an operator's declaration says of a parameter.
_DECLARED: dict[tuple[Member, ...], Kind] = {
    (Member(parameters.TENSOR),): TENSOR,
    (Member(parameters.RECORD),): OPERAND,
    (Member(parameters.OPERAND),): OPERAND,
    (Member(parameters.QUANTIZER),): QUANTIZER,
    (Member(parameters.SAVED),): UNREAD,
    (Member(parameters.TENSOR, 1),): OPERANDS,
    (Member(parameters.OPERAND, 1),): OPERANDS,
    (Member(parameters.QUANTIZER, 1),): QUANTIZERS,
    (Member(parameters.INTEGER, 1),): NUMBERS,
    (Member(parameters.NUMBER, 2),): NUMBER_LISTS,
    (Member(parameters.INTEGER, 1), Member(parameters.TENSOR)): SPLITS,
    (Member(parameters.NUMBER),): NUMBER,
    (Member(parameters.INTEGER),): NUMBER,
    (Member(parameters.INTEGERS),): NUMBERS,
    (Member(parameters.NUMBERS),): NUMBERS,
    (Member(parameters.STRING),): OPTION,
    (Member(parameters.FLAG),): OPTION,
    (Member(parameters.DTYPE),): OPTION,
}


def kind_of(parameter: Parameter) -> Kind:
    """What of an operator's argument the keys of its calls are made of."""
    return _DECLARED[parameter.members]
