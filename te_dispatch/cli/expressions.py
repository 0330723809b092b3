# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A constructor's call on the command line: ``Linear(1024, 4096, bias=False)``. It is parsed and never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from te_dispatch.cli.console import CommandError
from te_dispatch.core.policy.known import did_you_mean


def read_call(option: str, text: str, classes: Mapping[str, type]) -> tuple[type, list[Any], dict[str, Any]]:
    """A class, and the arguments of its constructor: literals of Python.

    Args:
        option: that the text was given for, for messages.
        text: a name, or a call of it; a module's name in front of it (``te.Linear``) has no effect.
        classes: by name.

    Raises:
        CommandError: it is nothing of the kind, or names another class.
    """
    form = f"{option}: cannot read {text!r}: write a call with literal arguments and nothing else"
    try:
        node: ast.expr = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise CommandError(f"{form} ({error.msg if isinstance(error, SyntaxError) else error})") from None
    except (RecursionError, MemoryError):
        raise CommandError(f"{option}: nested too deeply") from None
    call = node if isinstance(node, ast.Call) else None
    name = _name(node if call is None else call.func)
    if name is None:
        raise CommandError(form)
    found = classes.get(name)
    if found is None:
        raise CommandError(f"{option}: unknown class {name!r}{did_you_mean(name, classes)}")
    if call is None:
        return found, [], {}
    named: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise CommandError(f"{form}; ** is none")
        named[keyword.arg] = _literal(form, keyword.value)
    return found, [_literal(form, argument) for argument in call.args], named


def _name(node: ast.expr) -> str | None:
    """The last part of a dotted name."""
    last = node.attr if isinstance(node, ast.Attribute) else None
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return last or node.id


def _literal(form: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise CommandError(f"{form}; {ast.unparse(node)!r} is no literal") from None
