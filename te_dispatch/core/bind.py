# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Importing an implementation, checking its signature, and making it cheap to call.

Operators keep keyword-only parameters in their public signatures, but forwarding them by keyword is what makes
dispatch slow (CPython turns a call into a dict call beyond a few keywords). So the runtime forwards positionally, to a
*twin* of the implementation: the same code object with its keyword-only parameters made positional.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Set
from types import CodeType, FunctionType
from typing import Any

from te_dispatch.core import codegen
from te_dispatch.core.autograd import bound_below_autograd
from te_dispatch.core.errors import BindError
from te_dispatch.core.failures import phrase, place
from te_dispatch.core.operator import Operator


def import_target(target: str) -> Any:
    """Import ``module:attribute``."""
    module_name, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def import_declared(target: str, what: str = "") -> Any:
    """`import_target` of what a manifest names.

    Args:
        what: stands in front of the target in the error's message.

    Raises:
        BindError: it cannot be imported.
    """
    try:
        return import_target(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = f"{what} {target}" if what else target
        raise BindError(f"{where} cannot be imported: {phrase(error)}{place(error)}") from error


def load(operator: Operator, candidate: str, target: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Import an implementation and check it.

    Returns:
        The function as its author wrote it, and the newer keyword parameters it lacks.

    Raises:
        BindError: it cannot be imported, is not callable, or its signature does not fit.
    """
    function = import_declared(target, f"{candidate}:")
    if not callable(function):
        raise BindError(f"{candidate}: {target} is {type(function).__name__}, not callable")
    return function, lacking_parameters(operator, function, candidate)


def lacking_parameters(operator: Operator, function: Callable[..., Any], candidate: str) -> tuple[str, ...]:
    """Compare an implementation's signature with the operator's.

    Names, order and defaults must agree; keyword-only parameters may be declared positional-or-keyword. Keyword
    parameters with defaults may be missing altogether: plugins and core are released apart.

    Raises:
        BindError: with both signatures.
    """
    try:
        theirs = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise BindError(f"{candidate} has no readable signature: {error}") from error

    def refuse(what: str) -> BindError:
        return BindError(
            f"{candidate}: {what}\n  operator:       {_brief(operator.signature)}\n  implementation: {_brief(theirs)}"
        )

    ours = operator.signature.parameters
    lacking = tuple(
        name
        for name, p in ours.items()
        if name not in theirs.parameters and p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    )
    expected = [name for name in ours if name not in lacking]
    given = list(theirs.parameters)
    if given != expected:
        extra = [name for name in given if name not in ours]
        missing = [name for name in expected if name not in given]
        if extra:
            raise refuse(f"unknown parameter {extra[0]!r}")
        if missing:
            raise refuse(f"missing parameter {missing[0]!r}")
        raise refuse("parameters are in another order")
    for name in expected:
        p, q = ours[name], theirs.parameters[name]
        if q.kind in (q.VAR_POSITIONAL, q.VAR_KEYWORD, q.POSITIONAL_ONLY):
            raise refuse(f"parameter {name!r} must be nameable")
        if type(p.default) is not type(q.default) or p.default != q.default:
            raise refuse(f"the default of {name!r} differs")
        if p.kind is p.POSITIONAL_OR_KEYWORD and q.kind is q.KEYWORD_ONLY:
            raise refuse(f"{name!r} may be passed by position but is declared keyword-only")
    return lacking


def _brief(signature: inspect.Signature) -> str:
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def callable_of(
    operator: Operator, traits: Set[str], function: Callable[..., Any], lacking: tuple[str, ...]
) -> Callable[..., Any]:
    """`positional`, with autograd and torch.autocast off where the function consists of PyTorch's operators."""
    made = positional(operator, function, lacking)
    return bound_below_autograd(operator, made) if "plain_torch" in traits else made


_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def positional(operator: Operator, function: Callable[..., Any], lacking: tuple[str, ...]) -> Callable[..., Any]:
    """A callable that takes all of the operator's arguments by position, in order, and calls `function`."""
    taken = tuple(name for name in operator.signature.parameters if name not in lacking)
    if not isinstance(function, FunctionType) or _own_parameters(function) != taken:
        return codegen.keyword_launcher(operator, function, lacking)
    return codegen.dropping_adapter(operator, _twin(function), lacking) if lacking else _twin(function)


def _own_parameters(function: FunctionType) -> tuple[str, ...] | None:
    """What the code itself takes, None if variadic: a wrapper's signature may be that of the function it wraps."""
    code = function.__code__
    if code.co_flags & _VARIADIC:
        return None
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _twin(function: FunctionType) -> FunctionType:
    code: CodeType = function.__code__
    if code.co_kwonlyargcount:
        code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    twin = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    twin.__qualname__ = function.__qualname__
    twin.__module__ = function.__module__
    twin.__doc__ = function.__doc__
    return twin
