# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What kind of object each argument of a call is: checked where a call is resolved or has failed, not on the hot path.

The kinds are those of `te_dispatch.core.parameters`: the tests of plain values are here, those of records and
quantizers in `te_dispatch.core.operands`. What an argument holds (dtypes, shapes, options) is the business of
`te_dispatch.ops.checks`, which implementations call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from te_dispatch.core.operands import OPERANDS, Test
from te_dispatch.core.operator import Operator
from te_dispatch.core.parameters import Member


def is_tensor(value: Any) -> bool:
    """Whether an argument is a tensor."""
    torch = sys.modules.get("torch")
    # Without torch, and in tests of the runtime alone, whatever has a dtype and a device stands for a tensor.
    if torch is None or not isinstance(value, torch.Tensor):
        return torch is None or (
            hasattr(value, "dtype") and hasattr(value, "device") and not isinstance(value, OPERANDS.record)
        )
    return True


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not hasattr(value, "dtype")


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not hasattr(value, "device")


def _is_dtype(value: Any) -> bool:
    # A policy's name for a dtype (``bf16``) never gets here: operators take torch's.
    return type(value).__name__ == "dtype"


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _pair_of(test: Test) -> Test:
    return lambda value: isinstance(value, tuple) and len(value) == 2 and all(test(v) for v in value)


#: Kind -> what it is in words, and its test; of plain values.
_PLAIN: dict[str, tuple[str, Test]] = {
    "torch.Tensor": ("a torch.Tensor", is_tensor),
    "torch.dtype": ("a torch.dtype", _is_dtype),
    "str": ("a str", lambda v: isinstance(v, str)),
    "bool": ("a bool", lambda v: isinstance(v, int)),
    "int": ("an int", _is_integer),
    "float": ("a number", _is_number),
    "tuple[int, int]": ("a tuple of two ints", _pair_of(_is_integer)),
    "tuple[float, float]": ("a tuple of two numbers", _pair_of(_is_number)),
}


def _kind(kind: str) -> tuple[str, Test]:
    """What a kind of argument is in words, and its test. Where nobody described operands, anything may be one."""
    return _PLAIN.get(kind) or OPERANDS.arguments.get(kind) or (kind, lambda value: True)


@functools.cache
def _indexed(operator: Operator) -> frozenset[str]:
    """Parameters of which a fact reads the first entry, so that there must be one."""
    expressions = [operator.device, *(fact.expression for fact in operator.facts.values())]
    return frozenset(
        name
        for name in operator.parameters
        if any(f"{name}[0]" in e and f"if {name} else" not in e for e in expressions)
    )


def check_kinds(operator: Operator, args: tuple[Any, ...]) -> None:
    """Refuse a call with an argument of another kind than its annotation says, or with tensors on several devices.

    Raises:
        TypeError, ValueError: name the argument, what came and what was expected.
    """
    values = dict(zip(operator.parameters, args))
    for name, parameter in operator.parameters.items():
        value = values[name]
        if value is None and parameter.optional:
            continue
        _check_one(name, value, parameter.members)
        if _is_sequence(value) and not value and name in _indexed(operator):
            raise ValueError(f"{name}: got an empty {type(value).__name__}, expected at least one entry")
    _check_devices(operator, values)


def _check_one(name: str, value: Any, members: Sequence[Member]) -> None:
    for kind, depth in members:
        if not depth:
            if _kind(kind)[1](value):
                return
        elif _is_sequence(value):
            for i, entry in enumerate(value):
                _check_one(f"{name}[{i}]", entry, (Member(kind, depth - 1),))
            return
    raise TypeError(f"{name}: got {_brief(value)}, expected {' or '.join(map(_in_words, members))}")


def _in_words(member: Member) -> str:
    return "a list or tuple, each entry " * member.depth + _kind(member.kind)[0]


def _brief(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, (str, bool, int, float)) else ""
    return f"{type(value).__name__} {text[:60]}".rstrip()


def _check_devices(operator: Operator, values: dict[str, Any]) -> None:
    """All tensors of a call lie on one device; splits may also be host data."""
    first: tuple[str, Any] | None = None
    for name, value in values.items():
        members = value if _is_sequence(value) else [value]
        for i, member in enumerate(members):
            device = getattr(member, "device", None)
            if device is None or name == "splits":
                continue
            label = f"{name}[{i}]" if members is value else name
            if first is None:
                first = (label, device)
            elif device != first[1]:
                raise ValueError(f"{label}: got device {device}, expected {first[0]}'s, {first[1]}")
