# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What kind of object each argument of a call is: checked where a call is resolved or has failed, not on the hot path.

The kinds are read off the operators' annotations: those of plain values are here, those of records and quantizers in
`te_dispatch.core.operands`. What an argument holds (dtypes, shapes, options) is the business of
`te_dispatch.ops.checks`, which implementations call.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

from te_dispatch.core.operands import OPERANDS, Test
from te_dispatch.core.operator import Operator


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


#: Annotation -> what it says in words, and its test; of plain values.
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
_SEQUENCE = re.compile(r"Sequence\[(.*)\]")


def _kind(annotation: str) -> tuple[str, Test] | None:
    """What an annotation says in words, and its test; None for one that is not known."""
    return _PLAIN.get(annotation) or OPERANDS.arguments.get(annotation)


@functools.cache
def _parameters(operator: Operator) -> tuple[tuple[str, bool, tuple[str, ...], bool], ...]:
    """(name, may be None, annotations of which one must fit, must not be empty), for annotations that are known."""
    expressions = [operator.device, *(fact.expression for fact in operator.facts.values())]
    found = []
    for p in operator.signature.parameters.values():
        members = [m.strip() for m in str(p.annotation).split("|")]
        known = tuple(m for m in members if _kind(m) or _SEQUENCE.fullmatch(m))
        if not known or len(known) + ("None" in members) != len(members):
            continue
        indexed = any(f"{p.name}[0]" in e and f"if {p.name} else" not in e for e in expressions)
        found.append((p.name, "None" in members, known, indexed))
    return tuple(found)


def check_kinds(operator: Operator, args: tuple[Any, ...]) -> None:
    """Refuse a call with an argument of another kind than its annotation says, or with tensors on several devices.

    Raises:
        TypeError, ValueError: name the argument, what came and what was expected.
    """
    values = dict(zip(operator.signature.parameters, args))
    for name, optional, kinds, indexed in _parameters(operator):
        value = values[name]
        if value is None and optional:
            continue
        _check_one(name, value, kinds)
        if indexed and _is_sequence(value) and not value:
            raise ValueError(f"{name}: got an empty {type(value).__name__}, expected at least one entry")
    _check_devices(operator, values)


def _check_one(name: str, value: Any, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        sequence = _SEQUENCE.fullmatch(kind)
        if sequence is None:
            known = _kind(kind)
            if known is not None and known[1](value):
                return
        elif _is_sequence(value):
            for i, member in enumerate(value):
                _check_one(f"{name}[{i}]", member, (sequence[1],))
            return
    raise TypeError(f"{name}: got {_brief(value)}, expected {' or '.join(_in_words(kind) for kind in kinds)}")


def _in_words(kind: str) -> str:
    sequence = _SEQUENCE.fullmatch(kind)
    if sequence is not None:
        return f"a list or tuple, each entry {_in_words(sequence[1])}"
    known = _kind(kind)
    return kind if known is None else known[0]


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
