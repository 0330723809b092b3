# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A cache in front of a check: which calls passed, because a model makes the same calls in every step.

`cached_check` wraps a check. The wrapper collects the facts of a call (options, tags of records and quantizers, leading
shapes) and its tensors, finds the passes with the same facts, and compares the tensors' class, shape, dtype and device
with those that passed. Where nothing fits the check runs, so a wrong call gets the check's own error: only passes are
cached, and no tensor is kept.

Facts and comparison cover everything that a check may read, and nothing of what tensors contain. What kind an argument
is follows from the operator's declaration (`te_dispatch.core.parameters`). So whoever writes a check

- names the operator, and calls arguments as it does,
- says which tensors' contents it looks into (`CONTENTS`), and reads nothing else that the kinds do not cover.

`tests/bad_input/test_check_cache.py` makes each declared call invalid in many ways and compares with the check.

The wrapper is generated with the check's exact parameters, because a loop over the arguments would cost more than
most checks. The check itself stays reachable as `__wrapped__`, the passes as `passed`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling  # noqa: F401  # called by generated code

from te_dispatch.core import parameters as kinds
from te_dispatch.core.bounded import BoundedDict
from te_dispatch.core.parameters import Member, Parameter
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
from te_dispatch.ops.checks.guards import PLAIN, guard_for
from te_dispatch.ops.declared import parameters as parameters_of_operator

#: Quantizers of which checks read nothing but the encoding.
_OF_ENCODING = frozenset(
    (MXFP8Quantizer, MXFP8TileQuantizer, NVFP4Quantizer, NVFP4HadamardQuantizer, NVFP4FourOverSixQuantizer)
)

P = ParamSpec("P")
R = TypeVar("R")

#: Sets of facts that one check remembers, and passes with the same facts (tensors of other dtypes, say).
#: A model makes some tens of different calls; one takes about 2 KiB.
CAPACITY, PASSES = 1024, 8

#: Options whose values never change.
_CONSTANT = (str, int, float, torch.dtype, torch.device)
_NOTHING: tuple[None, tuple[()]] = (None, ())


class Kind(NamedTuple):
    """What of an argument ``{x}`` is looked at.

    Attributes:
        facts: code of hashable values, separated by commas.
        tensors: code of the tensors to compare, separated by commas.
        first: code that runs before both.
        lasting: of an argument that is not None: whether a pass that rests on these may be cached.
        strides: whether the tensors' strides matter.
        optional: whether calls usually leave it None. Those that leave all such arguments None are looked at without.
    """

    facts: str
    tensors: str = ""
    first: str = ""
    lasting: Callable[[Any], bool] = lambda x: True
    strides: bool = False
    optional: bool = False


def _plain(x: Any) -> bool:
    return x.__class__ in PLAIN


#: A tensor that is always there, one for each check: its shape is among the facts, because that tells most calls apart.
LEADING = Kind("{x}.shape", "{x},", lasting=_plain)
#: A tensor that is always there, only read: its strides do not matter.
TENSOR = Kind("", "{x},", lasting=_plain)
#: The same, or None.
OPTIONAL = Kind("{x} is None", "*(() if {x} is None else ({x},)),", lasting=_plain, optional=True)
#: The same where modules give it as often as not: a call with it is a usual one.
OFTEN = OPTIONAL._replace(optional=False)
#: A tensor or None. Written to, where elements that share memory are refused.
WRITTEN = OPTIONAL._replace(strides=True)
#: A tensor or None that the check looks into where that is free, on the host. There it is looked into every time.
CONTENTS = OPTIONAL._replace(lasting=lambda x: _plain(x) and not x.is_cpu)
#: A tensor or a `Quantized` that is always there.
OPERAND = Kind(
    "{x}_facts",
    "*{x}_tensors,",
    "{x}_facts, {x}_tensors = (True, ({x},)) if {x}.__class__ in PLAIN else _record({x})",
    lambda x: _plain(x) or x.__class__ is Quantized,
)
#: The same, leading: with the shape of a tensor among the facts. (That of a record always is.)
LEADING_OPERAND = OPERAND._replace(first=OPERAND.first.replace("(True,", "({x}.shape,"))
_LEADS = {TENSOR: LEADING, OPERAND: LEADING_OPERAND}
#: A `Quantized` that is always there.
RECORD = OPERAND._replace(first="{x}_facts, {x}_tensors = _record({x})", lasting=lambda x: x.__class__ is Quantized)
#: A tensor, a `Quantized` or None.
OPTIONAL_OPERAND = OPERAND._replace(
    first=OPERAND.first.replace("else", "else _NOTHING if {x} is None else"), optional=True
)
#: A `Quantized` or None that is written to.
WRITTEN_RECORD = OPTIONAL_OPERAND._replace(lasting=RECORD.lasting, strides=True)
#: A quantizer that is always there.
QUANTIZER = OPERAND._replace(first="{x}_facts, {x}_tensors = _quantizer({x})", lasting=lambda x: True)
#: A quantizer or None.
OPTIONAL_QUANTIZER = QUANTIZER._replace(
    first="{x}_facts, {x}_tensors = _NOTHING if {x} is None else _quantizer({x})", optional=True
)
#: The same, given as often as not.
OFTEN_QUANTIZER = OPTIONAL_QUANTIZER._replace(optional=False)
#: A word, a flag, a dtype, a device, or None.
OPTION = Kind("{x}", lasting=lambda x: isinstance(x, _CONSTANT))
#: A number or None. The class counts too, because 1, 1.0 and True are equal and hash alike.
NUMBER = OPTION._replace(facts="{x}.__class__, {x}")
#: The same, usually None.
OPTIONAL_NUMBER = NUMBER._replace(optional=True)
#: A list or tuple of tensors that is always there, only read.
TENSORS = Kind(
    "{x}.__class__, len({x})", "*{x},", lasting=lambda xs: xs.__class__ in (list, tuple) and all(map(_plain, xs))
)
#: The same, written to.
WRITTEN_TENSORS = TENSORS._replace(strides=True)
#: The same, or None.
OPTIONAL_WRITTEN_TENSORS = WRITTEN_TENSORS._replace(
    facts="None if {x} is None else ({x}.__class__, len({x}))", tensors="*(() if {x} is None else {x}),"
)
#: A list or tuple of lists or tuples of numbers.
NUMBER_LISTS = Kind(
    "_number_lists({x})", lasting=lambda xs: all(isinstance(n, _CONSTANT) for numbers in xs for n in numbers)
)
#: A tuple of numbers, or None.
NUMBERS = Kind(
    "None if {x} is None else _numbers({x})", lasting=lambda x: all(isinstance(n, _CONSTANT) for n in x), optional=True
)


#: By what an operator's declaration says of a parameter: the kind, and how deep in lists. A kind for those that are
#: always there, for those that may be None, for those that are written, and for both.
_DECLARED: dict[Member, tuple[Kind | None, Kind | None, Kind | None, Kind | None]] = {
    Member(kinds.TENSOR): (TENSOR, OPTIONAL, WRITTEN, WRITTEN),
    Member(kinds.RECORD): (RECORD, None, None, WRITTEN_RECORD),
    Member(kinds.OPERAND): (OPERAND, OPTIONAL_OPERAND, None, None),
    Member(kinds.QUANTIZER): (QUANTIZER, OPTIONAL_QUANTIZER, None, None),
    Member(kinds.TENSOR, 1): (TENSORS, None, WRITTEN_TENSORS, OPTIONAL_WRITTEN_TENSORS),
    Member(kinds.NUMBER, 2): (NUMBER_LISTS, None, None, None),
    Member(kinds.NUMBER): (NUMBER, NUMBER, None, None),
    Member(kinds.INTEGER): (NUMBER, OPTIONAL_NUMBER, None, None),
    Member(kinds.INTEGERS): (None, NUMBERS, None, None),
    Member(kinds.NUMBERS): (None, NUMBERS, None, None),
    Member(kinds.STRING): (OPTION, OPTION, None, None),
    Member(kinds.FLAG): (OPTION, OPTION, None, None),
    Member(kinds.DTYPE): (OPTION, OPTION, None, None),
}


def _kind_of(parameter: Parameter) -> Kind:
    """How a check's argument is looked at, where nothing else is said."""
    found = None
    if len(parameter.members) == 1:
        found = _DECLARED[parameter.members[0]][parameter.optional + 2 * parameter.written]
    if found is None:
        raise TypeError(f"{parameter.name}: got {parameter}, of which calls cannot be told apart")
    return found


def cached_check(operator: str = "", **exceptions: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a check: ``@cached_check("quantize")``.

    Args:
        operator: whose arguments the check takes; those that the operator does not have are `OPTION`.
        exceptions: kinds of arguments that are to be looked at otherwise than the operator's declaration says. Where
            none of them leads, the first tensor does.
    """
    declared = parameters_of_operator(operator) if operator else {}

    def wrap(check: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(check).parameters
        if unknown := exceptions.keys() - parameters.keys():
            raise TypeError(f"{check.__name__}: takes no {', '.join(sorted(unknown))}")
        found = {name: _kind_of(declared[name]) if name in declared else OPTION for name in parameters} | exceptions
        first = next((name for name, kind in found.items() if kind in _LEADS), None)
        if first is not None and not any(kind in _LEADS.values() for kind in exceptions.values()):
            found[first] = _LEADS[found[first]]
        return _wrapper(check, found)

    return wrap


_serial = itertools.count()
_WRAPPER = """
def make(check, passed, learn):
    def look({names}):
        if {absent}:
            if {plain}:
                {first[0]}
                return ({facts[0]}), ({tensors[0]})
            {first[1]}
            return ({facts[1]}), ({tensors[1]})
        {first[2]}
        return ({facts[2]}), ({tensors[2]})

    def {name}({names}):
        if is_dynamo_compiling():
            return check({names})
        try:
            if {absent}:
                if {plain}:
                    {first[0]}
                    for fits, result in passed[({facts[0]})]:
                        if fits({tensors[0]}):
                            return result
                else:
                    {first[1]}
                    for fits, result in passed[({facts[1]})]:
                        if fits({tensors[1]}):
                            return result
            else:
                {first[2]}
                for fits, result in passed[({facts[2]})]:
                    if fits({tensors[2]}):
                        return result
        except Exception:  # new facts, or something of a kind that was not foreseen: the check shall say
            pass
        return learn(look, ({names},))

    return {name}
"""


def _source(name: str, arguments: dict[str, Kind]) -> str:
    """Calls take one of three forms, which look at less the more usual they are: with all optional arguments None and
    every operand a plain tensor; with the former; any. The facts of no form equal those of another: they differ in
    number, or hold a record's tags where the other has a shape.
    """
    operands = {x: kind for x, kind in arguments.items() if kind in (OPERAND, LEADING_OPERAND)}
    usual = {x: kind for x, kind in arguments.items() if not kind.optional}
    plain = usual | {x: LEADING if kind is LEADING_OPERAND else TENSOR for x, kind in operands.items()}
    forms = [
        [[code.format(x=x) for code in kind[:3]] for x, kind in form.items()] for form in (plain, usual, arguments)
    ]
    return _WRAPPER.format(
        name=name,
        names=", ".join(arguments),
        absent=" and ".join(f"{x} is None" for x, kind in arguments.items() if kind.optional) or "True",
        plain=" and ".join(f"{x}.__class__ in PLAIN" for x in operands) or "True",
        facts=["".join(f"{facts}, " for facts, _, _ in form if facts) for form in forms],
        tensors=[" ".join(tensors for _, tensors, _ in form) for form in forms],
        first=["; ".join(first for _, _, first in form if first) or "pass" for form in forms],
    )


def _wrapper(check: Callable[P, R], arguments: dict[str, Kind]) -> Callable[P, R]:
    passed: BoundedDict[Any, Any] = BoundedDict(CAPACITY)
    learn = functools.partial(_learn, check, tuple(arguments.values()), passed)
    wrapper = _compiled(_source(check.__name__, arguments), check.__name__)(check, passed, learn)
    functools.update_wrapper(wrapper, check)
    wrapper.__defaults__ = check.__defaults__
    wrapper.passed = passed
    return wrapper  # type: ignore[no-any-return]


def _compiled(source: str, label: str) -> Any:
    """`make` of a source text, in this module's namespace; tracebacks and debuggers find the text."""
    filename = f"<te_dispatch cached check {label} {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    made: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), globals(), made)
    return made["make"]


def _learn(
    check: Callable[..., Any],
    looks: Sequence[Kind],
    passed: dict[Any, list[Any]],
    look: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Run the check; if the call passes and what was looked at is all that this depends on, cache it."""
    result = check(*arguments)
    given = [(kind, x) for kind, x in zip(looks, arguments) if x is not None]
    if torch.compiler.is_compiling() or not all(kind.lasting(x) for kind, x in given):
        return result
    try:
        facts, tensors = look(*arguments)
        passes = passed.get(facts, [])
    except Exception:  # nothing that a kind foresees: checked every time
        return result
    if not all(map(_plain, tensors)):
        return result
    written = {id(t) for kind, x in given if kind.strides for t in _tensors_of(x)}
    # A new list: another thread may be going through the old one.
    passed[facts] = [(guard_for(tensors, [id(t) in written for t in tensors]), result), *passes[: PASSES - 1]]
    return result


def _tensors_of(x: Any) -> Sequence[Any]:
    """The tensors of a tensor, a list or a record."""
    if _plain(x):
        return (x,)
    return x if isinstance(x, (list, tuple)) else _record(x)[1]


def _record(r: Any) -> tuple[Any, tuple[Any, ...]]:
    """Facts and tensors of a `Quantized`: those that belong to a copy that is there."""
    if r.__class__ is not Quantized:
        raise TypeError("other classes are checked every time")
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


def _quantizer(q: Any) -> tuple[Any, tuple[Any, ...]]:
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
    raise TypeError("other classes are checked every time")


def _numbers(values: Any) -> Any:
    return values.__class__, *((n.__class__, n) for n in values)


def _number_lists(lists: Any) -> Any:
    return lists.__class__, *((numbers.__class__, *numbers, *[n.__class__ for n in numbers]) for numbers in lists)
