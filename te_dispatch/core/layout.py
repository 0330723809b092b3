# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The layout of JSON files that te_dispatch wrote and that anything may have happened to since."""

from __future__ import annotations

from typing import Any

_NAMES = {
    dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def check_layout(value: Any, layout: Any, where: str = "") -> None:
    """Compare data read from JSON with what is expected.

    Args:
        value: the data.
        layout: a type; a tuple of layouts, one of which must fit; a list of one layout, for each element; or a dict,
            with a layout for each key that must be there, or for all keys under ``...``.
        where: the place of `value`, for messages.

    Raises:
        ValueError: with the place of what does not fit, e.g. ``choices[0].facts``.
    """
    if isinstance(layout, tuple):
        _check_any(value, layout, where)
    elif isinstance(layout, list):
        _check_type(value, list, where)
        for index, element in enumerate(value):
            check_layout(element, layout[0], f"{where}[{index}]")
    elif isinstance(layout, dict):
        _check_type(value, dict, where)
        expected = dict.fromkeys(value, layout[...]) if ... in layout else layout
        for key, inner in expected.items():
            place = f"{where}.{key}" if where else str(key)
            if key not in value:
                raise ValueError(f"{place} is missing")
            check_layout(value[key], inner, place)
    else:
        _check_type(value, layout, where)


def _check_any(value: Any, layouts: tuple[Any, ...], where: str) -> None:
    found: ValueError | None = None
    for layout in layouts:
        try:
            return check_layout(value, layout, where)
        except ValueError as error:
            # That of the layout which fits the value itself, but for something inside.
            found = error if found is None or isinstance(value, type(layout)) else found
    if found is not None:
        raise found


def _check_type(value: Any, expected: type, where: str) -> None:
    fits = isinstance(value, expected) and (expected is not int or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"{where or 'the file'}: expected {_NAMES[expected]}, got {_NAMES.get(type(value), value)}")
