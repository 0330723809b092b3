# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Generated functions of the hot path.

Three kinds, all with the operator's exact parameters:

- the *trampoline*, what users call: tests one flag and forwards, by position, to a module global;
- the *keyed* function a global may hold: looks the bound implementation up under a key of exactly the facts that
  resolution read;
- adapters for implementations that cannot be called positionally with every argument.

Every function is compiled afresh, in a module that `sys.modules` knows under its real name: torch.compile takes guards
through a function's ``__globals__['__name__']`` and caches per code object, so a foreign name or a shared code object
would make it reuse a stale graph in silence.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from te_dispatch.core.errors import Declined
from te_dispatch.core.operands import OPERANDS
from te_dispatch.core.operator import Operator
from te_dispatch.core.tables import Atom, Table, atom_expression

_serial = itertools.count()


def new_namespace(label: str) -> ModuleType:
    """A module registered under its own name, for the trampolines of one manager."""
    name = f"te_dispatch._bound.{label}_{next(_serial)}"
    module = ModuleType(name, "Generated trampolines of one OpManager.")
    module.__dict__.update(_scoped=False, Declined=Declined, _REAL=frozenset(), _SEQUENCES=(list, tuple))
    module.__dict__.update(OPERANDS.names())
    sys.modules[name] = module
    return module


def _compile(source: str, label: str, namespace: dict[str, Any], local: dict[str, Any] | None = None) -> None:
    filename = f"<te_dispatch {label} {next(_serial)}>"
    # Registered so that tracebacks, debuggers and torch.compile can show the source.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    code = compile(source, filename, "exec")
    weakref.finalize(_innermost(code), linecache.cache.pop, filename, None).atexit = False
    exec(code, namespace, local)


def _innermost(code: CodeType) -> CodeType:
    """The function that a source is made for: it outlives what makes it."""
    return next((_innermost(constant) for constant in code.co_consts if isinstance(constant, CodeType)), code)


def _arguments(operator: Operator) -> str:
    return ", ".join(operator.signature.parameters)


def _header(operator: Operator) -> str:
    parameters = []
    keyword_only = False
    for p in operator.signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        # Real defaults are set on the function: as text they would only be approximations.
        parameters.append(p.name if p.default is p.empty else f"{p.name}=None")
    return f"def {operator.name}({', '.join(parameters)}):\n"


def _source(operator: Operator, body: str) -> str:
    name, arguments = operator.name, _arguments(operator)
    return (
        f"{_header(operator)}"
        f"    if _scoped:\n"
        f"        return _{name}_scoped({arguments})\n"
        f"    try:\n"
        f"{body}"
        f"    except Declined as declined:\n"
        f"        return _{name}_declined(declined, {arguments})\n"
        # A lookup that cannot read its facts off an argument, most likely: say which argument is of the wrong kind.
        f"    except (AttributeError, LookupError, TypeError):\n"
        f"        _{name}_explain({arguments})\n"
        f"        raise\n"
    )


def _set_defaults(function: FunctionType, operator: Operator) -> None:
    values = list(operator.signature.parameters.values())
    positional = [p.default for p in values if p.kind is not p.KEYWORD_ONLY and p.default is not p.empty]
    function.__defaults__ = tuple(positional) or None
    keywords = {p.name: p.default for p in values if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    function.__kwdefaults__ = keywords or None


def forwarder(operator: Operator, namespace: ModuleType, target: str) -> FunctionType:
    """A function with the operator's signature that calls ``target(name, (every argument, in order))``.

    Args:
        target: a name in the namespace.
    """
    scratch: dict[str, Any] = {}
    call = f"    return {target}({operator.name!r}, ({_arguments(operator)},))\n"
    _exec_in(_header(operator) + call, f"{operator.name} forwarder", namespace, scratch)
    function: FunctionType = scratch[operator.name]
    _set_defaults(function, operator)
    return function


def trampoline(operator: Operator, namespace: ModuleType) -> FunctionType:
    """The public function. Expects ``_<name>`` and its ``_scoped``, ``_declined`` and ``_explain`` in the namespace."""
    name = operator.name
    _compile(_source(operator, f"        return _{name}({_arguments(operator)})\n"), name, namespace.__dict__)
    function: FunctionType = namespace.__dict__[name]
    values = operator.signature.parameters.values()
    _set_defaults(function, operator)
    function.__doc__ = operator.doc
    function.__module__ = "te_dispatch.ops"
    function.__annotations__ = {p.name: p.annotation for p in values if p.annotation is not p.empty}
    function.__annotations__["return"] = operator.signature.return_annotation
    return function


def inlined_code(operator: Operator, namespace: ModuleType, table: Table) -> CodeType:
    """Code of a trampoline with a table's lookup inside, which saves a call. Its variables go into the namespace."""
    # Its own names per table: a thread may still be in the code that reads the previous one's.
    prefix = f"_{operator.name}_{table.serial}"
    variables = namespace.__dict__
    table.copy_to(lambda name, value: variables.__setitem__(f"{prefix}{name}", value))
    scratch: dict[str, Any] = {}
    _compile(_source(operator, table.body(_arguments(operator), " " * 8, prefix)), operator.name, scratch)
    code: CodeType = scratch[operator.name].__code__
    return code


def key_expression(operator: Operator, atoms: Sequence[Atom], by_device: bool) -> str:
    """Source of a tuple: the device and class of the operands, if asked for, then every fact or condition."""
    parts = [operator.device, operator.device.removesuffix(".device") + ".__class__"] if by_device else []
    parts += [atom_expression(operator, atom) for atom in atoms]
    return f"({', '.join(parts)},)" if parts else "()"


def keyed(operator: Operator, namespace: ModuleType, table: Table) -> Callable[..., Any]:
    """A function of the operator's arguments, by position, that makes a table's lookup and calls what it finds."""
    arguments = _arguments(operator)
    source = (
        f"def make({', '.join(table.variables)}):\n"
        f"    def {operator.name}_keyed({arguments}):\n"
        f"{table.body(arguments, ' ' * 8)}"
        f"    return {operator.name}_keyed\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} keyed", namespace, local)
    function: FunctionType = local["make"](**table.variables)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))

    def copy(name: str, value: Any) -> None:
        if name in cells:  # not every variable is read in every mode
            cells[name].cell_contents = value

    table.copy_to(copy)
    return function


def guarding(
    operator: Operator, namespace: ModuleType, bound: Callable[..., Any], declined: Callable[..., Any]
) -> Callable[..., Any]:
    """`bound` with its own handling of `Declined`, for pieces of composites, which no trampoline wraps."""
    arguments = _arguments(operator)
    source = (
        f"def make(_bound, _on_declined):\n"
        f"    def {operator.name}_guarded({arguments}):\n"
        f"        try:\n"
        f"            return _bound({arguments})\n"
        f"        except Declined as declined:\n"
        f"            return _on_declined(declined, {arguments})\n"
        f"    return {operator.name}_guarded\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} guarded", namespace, local)
    return local["make"](bound, declined)  # type: ignore[no-any-return]


def repeating(
    operator: Operator,
    namespace: ModuleType,
    varying: Sequence[str],
    fixed: dict[str, Any],
    bound: Callable[..., Any],
    declined: Callable[..., Any],
    launch: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """A function of the `varying` arguments that makes a call in which the others are those of `fixed`.

    Args:
        launch: takes the varying arguments alone and makes the call; None where `bound` is given all.
        declined: goes on where either has declined; is given the exception and all arguments.
    """
    makers = namespace.__dict__.setdefault("_repeaters", {})
    key = (operator.name, tuple(varying), launch is None)
    make = makers.get(key)
    if make is None:  # compiled once: a model has thousands of such calls
        arguments, some = _arguments(operator), ", ".join(varying)
        call = f"_bound({arguments})" if launch is None else f"_launch({some})"
        source = (
            f"def make(_bound, _launch, _on_declined, {', '.join(fixed)}):\n"
            f"    def {operator.name}_repeated({some}):\n"
            f"        try:\n"
            f"            return {call}\n"
            f"        except Declined as declined:\n"
            f"            return _on_declined(declined, {arguments})\n"
            f"    return {operator.name}_repeated\n"
        )
        local: dict[str, Any] = {}
        _exec_in(source, f"{operator.name} repeated", namespace, local)
        make = makers[key] = local["make"]
    return make(bound, launch, declined, *fixed.values())  # type: ignore[no-any-return]


def sampling(
    operator: Operator,
    namespace: ModuleType,
    bound: Callable[..., Any],
    countdown: Callable[[], int],
    sample: Callable[..., Any],
) -> Callable[..., Any]:
    """`bound`, of whose calls some go to `sample` instead: the n-th after each `countdown() -> n`.

    Threads that count at once may lose a step, which delays a sample and does no harm.
    """
    arguments = _arguments(operator)
    source = (
        f"def make(_bound, _countdown, _sample):\n"
        f"    _left = _countdown()\n"
        f"    def {operator.name}_sampled({arguments}):\n"
        f"        nonlocal _left\n"
        f"        _left -= 1\n"
        f"        if _left > 0:\n"
        f"            return _bound({arguments})\n"
        f"        _left = _countdown()\n"
        f"        return _sample({arguments})\n"
        f"    return {operator.name}_sampled\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} sampled", namespace, local)
    return local["make"](bound, countdown, sample)  # type: ignore[no-any-return]


def reader(operator: Operator, namespace: ModuleType, expression: str, label: str) -> Callable[..., Any]:
    """A function of the operator's arguments that evaluates `expression`; the same one for equal expressions."""
    readers = namespace.__dict__.setdefault("_expression_readers", {})
    key = (operator.name, expression, label)
    if key in readers:
        return readers[key]  # type: ignore[no-any-return]
    source = (
        f"def make():\n    def {operator.name}_{label}({_arguments(operator)}):\n        return {expression}\n"
        f"    return {operator.name}_{label}\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} {label}", namespace, local)
    found = readers[key] = local["make"]()
    return found  # type: ignore[no-any-return]


def dropping_adapter(operator: Operator, twin: Callable[..., Any], lacking: tuple[str, ...]) -> Callable[..., Any]:
    """Takes all arguments, passes those on that the implementation has."""
    kept = ", ".join(name for name in operator.signature.parameters if name not in lacking)
    source = (
        f"def make(_twin):\n    def {operator.name}_adapter({_arguments(operator)}):\n        return _twin({kept})\n"
        f"    return {operator.name}_adapter\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} adapter", sys.modules[__name__], local)
    return local["make"](twin)  # type: ignore[no-any-return]


def switching(
    operator: Operator, function: Callable[..., Any], elsewhere: Callable[..., Any], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Takes all arguments by position, and calls `function` with autograd off; `elsewhere` in its place in a traced
    region or under torch.autocast. `functools.wraps` with ``*args`` would take twice the time.

    Args:
        settings: `is_tracing`, `any_autocast`, `is_grad_enabled` and `set_grad_enabled`, as in `core/autograd.py`.
    """
    given = ", ".join(operator.signature.parameters)
    source = (
        f"def make(_function, _elsewhere, {', '.join(settings)}):\n"
        f"    def {operator.name}_below_autograd({_arguments(operator)}):\n"
        f"        if is_tracing() or any_autocast():\n            return _elsewhere({given})\n"
        f"        if not is_grad_enabled():\n            return _function({given})\n"
        f"        set_grad_enabled(False)\n"
        f"        try:\n            return _function({given})\n"
        f"        finally:\n            set_grad_enabled(True)\n"
        f"    return {operator.name}_below_autograd\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} below autograd", sys.modules[__name__], local)
    return functools.update_wrapper(local["make"](function, elsewhere, **settings), function)


def keyword_launcher(operator: Operator, function: Callable[..., Any], lacking: tuple[str, ...]) -> Callable[..., Any]:
    """For callables without code of their own to make a twin of: wrapped, variadic or compiled functions."""
    passed = []
    for p in operator.signature.parameters.values():
        if p.name not in lacking:
            passed.append(p.name if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else f"{p.name}={p.name}")
    source = (
        f"def make(_function):\n    def {operator.name}_launcher({_arguments(operator)}):\n"
        f"        return _function({', '.join(passed)})\n    return {operator.name}_launcher\n"
    )
    local: dict[str, Any] = {}
    _exec_in(source, f"{operator.name} launcher", sys.modules[__name__], local)
    return local["make"](function)  # type: ignore[no-any-return]


def _exec_in(source: str, label: str, namespace: ModuleType, local: dict[str, Any]) -> None:
    """Compile with the namespace as globals. `make` never enters it: two threads may be compiling at once."""
    _compile(source, label, namespace.__dict__, local)
