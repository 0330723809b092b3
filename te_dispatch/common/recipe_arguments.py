# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the constructors of recipes and of their parameters take.

Transformer Engine's are pydantic dataclasses: they convert values as pydantic's lax mode does, and take unknown
keywords in silence. Here values are converted alike, and unknown keywords are warned of. pydantic itself is not used,
because recipes need no library.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple, TypeVar

_Kind = TypeVar("_Kind")


# -- values ------------------------------------------------------------------------------------------------------------


class Conversion(NamedTuple):
    """How values of a field are converted.

    Attributes:
        expected: what the field takes, for messages.
        convert: gives the value of the field; raises a TypeError, ValueError or OverflowError for any other.
    """

    expected: str
    convert: Callable[[Any], Any]


_WHOLE = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0+)?\s*", re.ASCII)
_TRUTH = {
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
}
#: pydantic converts floats to int as 64-bit numbers.
_LARGEST = 2.0**63


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str.__str__(value)


def _to_int(value: Any) -> int:
    if isinstance(value, Enum) and not isinstance(value, int):
        value = value.value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (str, bytes)):
        found = _WHOLE.fullmatch(_text(value))
        if found is None:
            raise ValueError
        return int(found[1])
    number = _to_float(value)
    if not number.is_integer() or not -_LARGEST <= number < _LARGEST:
        raise ValueError
    return int(number)


def _to_float(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        value = _text(value)
        if not value.isascii():
            raise ValueError
    elif not hasattr(type(value), "__float__"):
        raise TypeError
    return float(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, bytes)):
        return _TRUTH[_text(value).lower()]
    number = _to_int(value)
    if number not in (0, 1):
        raise ValueError
    return number == 1


def _to_str(value: Any) -> Any:
    """Anything but a string is left to the check of the recipe, which lists the strings that the field takes."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    return str.__str__(value) if isinstance(value, str) else value


#: By the annotation of a field. Fields of other types are taken as they are, and checked by their recipe.
CONVERSIONS = {
    "int": Conversion("an int", _to_int),
    "float": Conversion("a number", _to_float),
    "bool": Conversion("a bool", _to_bool),
    "str": Conversion("a string", _to_str),
    "str | None": Conversion("a string or None", _to_str),
}


def converted(kind: type, name: str, value: Any) -> Any:
    """A value as the field of that name of a dataclass holds it.

    Raises:
        TypeError: it cannot be converted; names the class, the field, the value and what is expected.
    """
    conversion = _conversions(kind).get(name)
    if conversion is None:
        return value
    try:
        return conversion.convert(value)
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        why = f": {error}" if isinstance(value, dict) else ""
        raise TypeError(f"{kind.__name__}: {name} must be {conversion.expected}, got {value!r}{why}") from None


def convert_fields(made: Any) -> None:
    """Convert the fields of a dataclass, frozen or not, that its constructor has just set."""
    kind = type(made)
    for name in _conversions(kind):
        object.__setattr__(made, name, converted(kind, name, getattr(made, name)))


@functools.cache
def _conversions(kind: Any) -> dict[str, Conversion]:
    """Of the fields of a class that have one."""
    annotations = {
        field.name: field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        for field in fields(kind)
    }
    return {name: CONVERSIONS[text] for name, text in annotations.items() if text in CONVERSIONS}


@functools.cache
def names(kind: Any) -> tuple[str, ...]:
    """Of the fields of a class."""
    return tuple(field.name for field in fields(kind))


# -- keywords ----------------------------------------------------------------------------------------------------------

#: Keywords of earlier recipes of Transformer Engine, which frameworks still pass: the default, which is what recipes
#: do, and why another value does nothing.
_GONE = {
    "interval": (1, "scales are updated at every step"),
    "override_linear_precision": (
        (False, False, False), "all products are quantized; leave a module out of the autocast instead"
    ),
}  # fmt: skip
#: (class, keyword) that were warned of.
_warned: set[tuple[type, str]] = set()


def lenient(kind: type[_Kind]) -> type[_Kind]:
    """Decorator of a dataclass: unknown keywords of its constructor are warned of once by name.

    So are keywords of casts, which the constructors of Transformer Engine's recipes replace by what the knobs say.
    """
    make, known = kind.__init__, frozenset(names(kind))

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if unknown := given.keys() - known:
            for name in sorted(unknown):
                value = given.pop(name)
                if name in _GONE and value == _GONE[name][0]:
                    continue
                warn_without_effect(kind, name, lambda name=name: _no_effect(kind, name))
        make(self, *args, **given)

    setattr(kind, "__init__", __init__)  # noqa: B010  # a method is not assigned to
    return kind


def warn_without_effect(kind: type, name: str, why: Callable[[], str], stacklevel: int = 3) -> None:
    """Warn once of an argument of a class that does nothing; `stacklevel` is that of who makes the instance."""
    if (kind, name) not in _warned:
        _warned.add((kind, name))
        warnings.warn(f"{kind.__name__}: {name} has no effect: {why()}", stacklevel=stacklevel)


def _no_effect(kind: Any, name: str) -> str:
    if name in getattr(kind, "CASTS", ()):
        return "the constructor sets it by the recipe's knobs; assign to it afterwards"
    if name in _GONE:
        return _GONE[name][1]
    from te_dispatch.core.policy.known import did_you_mean  # only a mistake pays for it

    return f"there is no argument of this name{did_you_mean(name, names(kind), listing=False)}"
