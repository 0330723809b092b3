# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call that is made again and again, past the lookup: what a caller keeps who makes the same call in every step.

Such calls differ from one another in tensors that look alike. They have the same facts, so the same winner, for as
long as the bindings they were resolved under are in force. An implementation may do better than being called: its
manifest may name a function (`te_dispatch.core.manifest.Implementation.plan`)

    plan(varying, **arguments) -> a function of the varying arguments, by position, or None

which is given the names of what varies and one call's arguments, and returns a function that makes the call for
whatever looks like them: a tensor of the same class, shape, strides, dtype and device, a record with the same tags and
copies, each tensor of it alike. What does not vary is the same object in every call, whatever it holds by then. The
function may raise `Declined` as the implementation may, before anything is written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import COMPOSITE

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings


def repeating(bindings: Bindings, name: str, varying: Sequence[str], **arguments: Any) -> Callable[..., Any] | None:
    """A function of the `varying` parameters of the operator `name`, for calls like the one with these arguments.

    It serves while `bindings` are in force, which the caller makes sure of.

    Returns:
        None where every call must be seen: an observer watches, a policy compares some, or one has declined before.
    """
    if bindings.observer is not None or bindings.policy.shadow is not None:
        return None
    operator = OPERATORS[name]
    call = _complete(operator, arguments)
    dispatcher = bindings.dispatcher(operator)
    entry = dispatcher.entry(tuple(call.values()))
    chosen = entry.chosen.id
    if entry.memory:
        return None
    fixed = {parameter: value for parameter, value in call.items() if parameter not in varying}
    launch = None
    if not chosen.startswith(f"{COMPOSITE}."):
        plan = bindings.manager.functions.declared(chosen, "plan")
        launch = None if plan is None else plan(tuple(varying), **call)
    return codegen.repeating(
        operator, bindings.manager.namespace, varying, fixed, entry.bound, dispatcher.declined, launch
    )


def _complete(operator: Operator, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with the defaults of those that it leaves out, in the order of the signature.

    Raises:
        TypeError: an argument that the operator does not have, or lacks.
    """
    defaults = _defaults(operator)
    call = {**defaults, **arguments}
    missing = [name for name, value in call.items() if value is inspect.Parameter.empty]
    if missing or len(call) != len(defaults):
        operator.signature.bind(**arguments)  # says which
    return call


@functools.cache
def _defaults(operator: Operator) -> dict[str, Any]:
    """Parameter -> default, `inspect.Parameter.empty` where there is none."""
    return {name: parameter.default for name, parameter in operator.signature.parameters.items()}
