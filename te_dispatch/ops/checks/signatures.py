# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Signatures: what of a call's arguments is compared with an earlier call's, as code that is generated for a function.

A signature is the facts of a call, which are hashed (options, tags of records and quantizers, leading shapes), and its
tensors, whose metadata a guard compares (`guards`). It covers everything that a function may read of its arguments, and
nothing of what tensors contain. Which `Kind` an argument is follows from the operator's declaration
(`te_dispatch.core.parameters`). Two caches are made of it: of argument checks that passed (`check_cache`), and of the
launches of backends (`te_dispatch.backend_kit.call_plans`), whose kinds are exact: they cover strides, all options of a
quantizer and the sign of zero, which no check reads.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor  # noqa: F401  # generated code
from torch.compiler import is_dynamo_compiling  # noqa: F401  # called by generated code

from te_dispatch.core import parameters as kinds
from te_dispatch.core.parameters import Member, Parameter
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.ops.checks.argument_facts import (  # noqa: F401  # generated code calls them
    read_exact_numbers,
    read_exact_quantizer,
    read_number_lists,
    read_numbers,
    read_operands,
    read_quantizer,
    read_quantizers,
    read_record,
    read_saved,
    read_splits,
)
from te_dispatch.ops.checks.guards import PLAIN, is_plain  # noqa: F401  # PLAIN: generated code
from te_dispatch.ops.declared import parameters as parameters_of_operator
from te_dispatch.ops.results import Saved

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


#: A tensor that is always there, one for each check: its shape is among the facts, because that tells most calls apart.
LEADING = Kind("{x}.shape", "{x},", lasting=is_plain)
#: A tensor that is always there, only read: its strides do not matter.
TENSOR = Kind("", "{x},", lasting=is_plain)
#: The same, or None.
OPTIONAL = Kind("{x} is None", "*(() if {x} is None else ({x},)),", lasting=is_plain, optional=True)
#: The same where modules give it as often as not: a call with it is a usual one.
OFTEN = OPTIONAL._replace(optional=False)
#: A tensor or None. Written to, where elements that share memory are refused.
WRITTEN = OPTIONAL._replace(strides=True)
#: A tensor or None that the check looks into where that is free, on the host. There it is looked into every time.
CONTENTS = OPTIONAL._replace(lasting=lambda x: is_plain(x) and not x.is_cpu)
#: A tensor or a `Quantized` that is always there.
OPERAND = Kind(
    "{x}_facts",
    "*{x}_tensors,",
    "{x}_facts, {x}_tensors = (True, ({x},)) if {x}.__class__ in PLAIN else read_record({x})",
    lambda x: is_plain(x) or x.__class__ is Quantized,
)
#: The same, leading: with the shape of a tensor among the facts. (That of a record always is.)
LEADING_OPERAND = OPERAND._replace(first=OPERAND.first.replace("(True,", "({x}.shape,"))
_LEADS = {TENSOR: LEADING, OPERAND: LEADING_OPERAND}
#: What an operand is looked at as where it is a plain tensor.
_AS_TENSOR = {OPERAND.first: TENSOR, LEADING_OPERAND.first: LEADING}
#: A `Quantized` that is always there.
RECORD = OPERAND._replace(first="{x}_facts, {x}_tensors = read_record({x})", lasting=lambda x: x.__class__ is Quantized)

#: A tensor, a `Quantized` or None.
OPTIONAL_OPERAND = OPERAND._replace(
    first=OPERAND.first.replace("else", "else _NOTHING if {x} is None else"), optional=True
)
#: A `Quantized` or None that is written to.
WRITTEN_RECORD = OPTIONAL_OPERAND._replace(lasting=RECORD.lasting, strides=True)
#: A quantizer that is always there.
QUANTIZER = OPERAND._replace(first="{x}_facts, {x}_tensors = read_quantizer({x})", lasting=lambda x: True)
#: A quantizer or None.
OPTIONAL_QUANTIZER = QUANTIZER._replace(
    first="{x}_facts, {x}_tensors = _NOTHING if {x} is None else read_quantizer({x})", optional=True
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
    "{x}.__class__, len({x})", "*{x},", lasting=lambda xs: xs.__class__ in (list, tuple) and all(map(is_plain, xs))
)
#: The same, written to.
WRITTEN_TENSORS = TENSORS._replace(strides=True)
#: The same, or None.
OPTIONAL_WRITTEN_TENSORS = WRITTEN_TENSORS._replace(
    facts="None if {x} is None else ({x}.__class__, len({x}))", tensors="*(() if {x} is None else {x}),"
)
#: The same, only read.
OPTIONAL_TENSORS = OPTIONAL_WRITTEN_TENSORS._replace(strides=False)
#: A list or tuple of tensors and `Quantized` that is always there.
OPERANDS = Kind(
    "{x}_facts",
    "*{x}_tensors,",
    "{x}_facts, {x}_tensors = read_operands({x})",
    lambda xs: xs.__class__ in (list, tuple),
)
#: A list or tuple of quantizers that is always there.
QUANTIZERS = OPERANDS._replace(first="{x}_facts, {x}_tensors = read_quantizers({x})")
#: Numbers of rows: a list or tuple of them, a tensor, or None.
SPLITS = OPERANDS._replace(
    first="{x}_facts, {x}_tensors = read_splits({x})",
    lasting=lambda x: is_plain(x) or all(isinstance(n, int) for n in x),
)
#: What a forward leaves for its backward, always there.
SAVED = OPERANDS._replace(first="{x}_facts, {x}_tensors = read_saved({x})", lasting=lambda x: x.__class__ is Saved)
#: A list or tuple of lists or tuples of numbers.
NUMBER_LISTS = Kind(
    "read_number_lists({x})", lasting=lambda xs: all(isinstance(n, _CONSTANT) for numbers in xs for n in numbers)
)
#: A tuple of numbers, or None.
NUMBERS = Kind(
    "None if {x} is None else read_numbers({x})",
    lasting=lambda x: all(isinstance(n, _CONSTANT) for n in x),
    optional=True,
)
#: A list or tuple of integers that is always there.
INTEGER_LIST = NUMBERS._replace(facts="read_numbers({x})", optional=False)


#: By what an operator's declaration says that a parameter takes, each with how deep in lists. A kind for those that are
#: always there, for those that may be None, for those that are written, and for both.
_DECLARED: dict[tuple[Member, ...], tuple[Kind | None, Kind | None, Kind | None, Kind | None]] = {
    (Member(kinds.TENSOR),): (TENSOR, OPTIONAL, WRITTEN, WRITTEN),
    (Member(kinds.RECORD),): (RECORD, None, None, WRITTEN_RECORD),
    (Member(kinds.OPERAND),): (OPERAND, OPTIONAL_OPERAND, None, None),
    (Member(kinds.QUANTIZER),): (QUANTIZER, OPTIONAL_QUANTIZER, None, None),
    (Member(kinds.SAVED),): (SAVED, None, None, None),
    (Member(kinds.TENSOR, 1),): (TENSORS, OPTIONAL_TENSORS, WRITTEN_TENSORS, OPTIONAL_WRITTEN_TENSORS),
    (Member(kinds.OPERAND, 1),): (OPERANDS, None, None, None),
    (Member(kinds.QUANTIZER, 1),): (QUANTIZERS, None, None, None),
    (Member(kinds.INTEGER, 1),): (INTEGER_LIST, None, None, None),
    (Member(kinds.INTEGER, 1), Member(kinds.TENSOR)): (SPLITS, SPLITS, None, None),
    (Member(kinds.NUMBER, 2),): (NUMBER_LISTS, None, None, None),
    (Member(kinds.NUMBER),): (NUMBER, NUMBER, None, None),
    (Member(kinds.INTEGER),): (NUMBER, OPTIONAL_NUMBER, None, None),
    (Member(kinds.INTEGERS),): (None, NUMBERS, None, None),
    (Member(kinds.NUMBERS),): (None, NUMBERS, None, None),
    (Member(kinds.STRING),): (OPTION, OPTION, None, None),
    (Member(kinds.FLAG),): (OPTION, OPTION, None, None),
    (Member(kinds.DTYPE),): (OPTION, OPTION, None, None),
}


def _kind_of(parameter: Parameter) -> Kind:
    """How a check's argument is looked at, where nothing else is said."""
    found = _DECLARED.get(parameter.members, (None,) * 4)[parameter.optional + 2 * parameter.written]
    if found is None:
        raise TypeError(f"{parameter.name}: got {parameter}, of which calls cannot be told apart")
    return found


def exact(kind: Kind) -> Kind:
    """The same kind, for a function that may read all of an argument but contents: strides, every option of a
    quantizer, the sign of a zero."""
    facts = {
        NUMBER.facts: "{x}.__class__, {x} or {x} is not None and repr({x})",
        NUMBERS.facts: "read_exact_numbers({x})",
    }
    return kind._replace(
        facts=facts.get(kind.facts, kind.facts),
        first=kind.first.replace("read_quantizer(", "read_exact_quantizer("),
        strides=bool(kind.tensors),
    )


def kinds_of(
    function: Callable[..., Any], operator: str, exceptions: Mapping[str, Kind], exactly: bool = False
) -> dict[str, Kind]:
    """The kinds of a function's arguments by name.

    Args:
        operator: whose arguments the function takes, empty for none. Those that it does not have are `OPTION`.
        exceptions: kinds of arguments that are to be looked at otherwise than the operator's declaration says. Where
            none of them leads, the first tensor does.
        exactly: whether the kinds are `exact`.

    Raises:
        TypeError: an exception for an argument that the function does not take, or an argument for which there is no
            kind.
    """
    declared = parameters_of_operator(operator) if operator else {}
    names = inspect.signature(function).parameters
    if unknown := exceptions.keys() - names.keys():
        raise TypeError(f"{function.__name__}: takes no {', '.join(sorted(unknown))}")
    found = {name: _kind_of(declared[name]) if name in declared else OPTION for name in names} | dict(exceptions)
    first = next((name for name, kind in found.items() if kind in _LEADS), None)
    if first is not None and not any(kind in _LEADS.values() for kind in exceptions.values()):
        found[first] = _LEADS[found[first]]
    return {name: exact(kind) for name, kind in found.items()} if exactly else found


class Code(NamedTuple):
    """How a function looks at its arguments, for the text of a generated function that has the same parameters.

    Calls take one of three forms, which look at less the more usual they are: with all optional arguments None and
    every operand a plain tensor; with the former; any. The facts of no form equal those of another: they differ in
    number, or hold a record's tags where the other has a shape.

    Attributes:
        names: of the arguments, separated by commas.
        absent, plain: conditions of the first form; the second has the first of them.
        first, facts, tensors: of each form: statements; then the items of a tuple of facts, and of one of tensors.
    """

    names: str
    absent: str
    plain: str
    first: Sequence[str]
    facts: Sequence[str]
    tensors: Sequence[str]

    def text(self, then: str, indent: int) -> str:
        """Statements that look at a call's arguments, in its form, and `then` do something.

        Args:
            then: statements with ``{facts}`` and ``{tensors}``, the items of two tuples.
            indent: spaces before each line but the first.
        """
        each = [
            f"{first}\n{then.format(facts=facts, tensors=tensors)}".replace("\n", "\n" + " " * (4 * depth))
            for first, facts, tensors, depth in zip(self.first, self.facts, self.tensors, (2, 2, 1))
        ]
        lines = (
            f"if {self.absent}:\n    if {self.plain}:\n        {each[0]}\n    else:\n        {each[1]}\n"
            f"else:\n    {each[2]}"
        )
        return lines.replace("\n", "\n" + " " * indent)


#: Most tensors are of the first class; comparing it takes two thirds of the time that a look into the set does.
_IS_PLAIN = "({x}.__class__ is Tensor or {x}.__class__ in PLAIN)"


def code_of(arguments: Mapping[str, Kind]) -> Code:
    """The code that looks at arguments of these kinds."""
    usual = {x: kind for x, kind in arguments.items() if not kind.optional}
    operands = {x: _AS_TENSOR[kind.first] for x, kind in usual.items() if kind.first in _AS_TENSOR}
    forms = [
        [[code.format(x=x) for code in kind[:3]] for x, kind in form.items()]
        for form in (usual | operands, usual, arguments)
    ]
    return Code(
        ", ".join(arguments),
        " and ".join(f"{x} is None" for x, kind in arguments.items() if kind.optional) or "True",
        " and ".join(_IS_PLAIN.format(x=x) for x in operands) or "True",
        ["; ".join(first for _, _, first in form if first) or "pass" for form in forms],
        ["".join(f"{facts}, " for facts, _, _ in form if facts) for form in forms],
        [" ".join(tensors for _, tensors, _ in form) for form in forms],
    )


_LOOK = """
def make():
    def look({names}):
        {body}

    return look
"""


def look_of(code: Code, name: str) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A function of the arguments, by position: their facts and their tensors."""
    body = code.text("return ({facts}), ({tensors})", 8)
    return compiled(_LOOK.format(names=code.names, body=body), f"signature of {name}")  # type: ignore[no-any-return]


_serial = itertools.count()


def compiled(source: str, label: str, **names: Any) -> Any:
    """What the function `make` of a source text returns, given `names`; tracebacks and debuggers find the text.

    It runs in this module: torch.compile looks up what a function's globals hold in the module that they are of.
    """
    filename = f"<te_dispatch {label} {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    made: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), globals(), made)
    return made["make"](**names)


def tensors_of(x: Any) -> Sequence[Any]:
    """The tensors of a tensor, a list or a record."""
    if is_plain(x):
        return (x,)
    return x if isinstance(x, (list, tuple)) else read_record(x)[1]


def parts_of(x: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an argument in the order of its signature, each with the code that reads it of the argument."""
    if is_plain(x):
        return [("", x)]
    if isinstance(x, (list, tuple)):
        return [(f"[{i}]{part}", tensor) for i, one in enumerate(x) for part, tensor in parts_of(one)]
    if x.__class__ is Saved:
        return [(f".tensors{part}", tensor) for part, tensor in parts_of(x.tensors)]
    if x.__class__ is not Quantized and not isinstance(x, DelayedQuantizer):
        return []
    tensors = (read_record if x.__class__ is Quantized else read_exact_quantizer)(x)[1]
    names = Quantized.__slots__ if x.__class__ is Quantized else ("scale", "amax")
    return [(next(f".{name}" for name in names if getattr(x, name) is tensor), tensor) for tensor in tensors]
