# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators: an interface, what resolution may read off its arguments, and how it can be composed of simpler ones.

An operator is declared once, by `operator` on a stub in `te_dispatch/ops/`: the stub's signature is the interface,
its docstring the contract. Everything else (facts, trampolines, signature checks of plugins, the command line) is
derived from it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from te_dispatch.core import parameters as kinds
from te_dispatch.core.facts import UNKNOWN, CallFacts, FactValue
from te_dispatch.core.operands import OPERANDS
from te_dispatch.core.parameters import Parameter, parameters_of

_DTYPE_NAMES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
}


def dtype_name(value: Any) -> FactValue:
    """A dtype as policies spell it: ``torch.bfloat16`` -> ``bf16``; other dtypes lose the ``torch.`` only."""
    if value is None or isinstance(value, str):
        return value
    text = str(value)
    return _DTYPE_NAMES.get(text, text.removeprefix("torch."))


@dataclass(frozen=True)
class Fact:
    """Something resolution may know about a call.

    Attributes:
        name: how requirements and policies refer to it.
        expression: Python source over the operator's parameters. It is compiled into the key of a dispatch table, so
            it must be cheap and must not fail for any valid call.
        kind: ``dtype`` (raw value is a dtype or an encoding's name), ``size`` (an int, compared by condition rather
            than keyed by value) or ``option`` (keyed by value).
        doc: one phrase for ``te-dispatch explain``.
        boolean: whether the option is a bool, or None.
        words: the values an option can have beside None; empty where they are not words, or any word will do.
    """

    name: str
    expression: str
    kind: str = "option"
    doc: str = ""
    boolean: bool = False
    words: tuple[str, ...] = ()

    @property
    def presence(self) -> bool:
        """Whether the fact says that an argument was given, rather than what it is."""
        return self.expression.endswith("is not None)")

    def canonical(self, raw: Any) -> FactValue:
        """The raw value as policies and requirements see it."""
        if self.kind == "dtype":
            return dtype_name(raw)
        if self.boolean and isinstance(raw, int):
            return bool(raw)  # a table's key does not tell 1 from True, so neither may a fact
        if raw is None or raw is UNKNOWN or isinstance(raw, (str, bool, int, float)):
            return raw
        if self.kind == "size":
            return int(raw)
        if type(raw).__module__ == "torch" and type(raw).__name__ == "dtype":
            return dtype_name(raw)
        if isinstance(raw, (tuple, list)):
            return tuple(raw)
        return str(raw)


@dataclass(frozen=True)
class Piece:
    """One step of a decomposition: the operator it calls, and that call's facts given the whole call's."""

    operator: str
    facts: Callable[[CallFacts], CallFacts]


@dataclass(frozen=True)
class Decomposition:
    """An operator expressed in simpler ones.

    Attributes:
        name: distinguishes several decompositions of one operator; the candidate's id is ``composite.<name>``.
        pieces: for a call's facts, the pieces by the name `build` takes them under, or None where this decomposition
            does not apply (a piece must be simpler than the whole, or resolution would never end).
        build: takes the bound pieces as keyword arguments and returns a function with the operator's signature.
        materializes: it builds what the operator exists to avoid (attention through the whole score matrix), so it
            ranks after every real implementation.
        simplifies: one of its pieces is always the operator itself with fewer options.
    """

    name: str
    pieces: Callable[[CallFacts], Mapping[str, Piece] | None]
    build: Callable[..., Callable[..., Any]]
    materializes: bool = False
    simplifies: bool = False


@dataclass(frozen=True)
class Operator:
    """An interface of the runtime.

    Attributes:
        name, version, family: the family names the module in `te_dispatch/ops/` and in every backend.
        signature: of the stub. parameters: what it says of each, by name.
        doc: the contract.
        device: expression for the call's device.
        facts: by name.
        shape: computes the results for meta or fake arguments.
        companion: the forward's backward and the other way round.
        backward: whether this operator is the backward of its companion.
        companion_facts: a forward's facts -> its backward's, as far as they are determined.
        saved: expression for the implementation id that a forward's ``saved`` carries; None where the results named
            in the interface are all that the backward needs.
        decompositions: in order of preference.
        mutates: parameters an implementation writes.
    """

    name: str
    version: int
    family: str
    signature: inspect.Signature
    doc: str
    device: str
    facts: Mapping[str, Fact]
    shape: Callable[..., Any]
    companion: str | None = None
    backward: bool = False
    companion_facts: Callable[[CallFacts], CallFacts] | None = None
    saved: str | None = None
    decompositions: list[Decomposition] = field(default_factory=list)
    mutates: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def memory(self) -> dict[str, str]:
        """Parameter that holds tensors -> their form (`te_dispatch.core.memory`)."""
        return {name: p.memory for name, p in self.parameters.items() if p.memory is not None}

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def default_facts(self) -> dict[str, FactValue]:
        """Facts of a call that gives no optional argument, for ``explain`` and for companions."""
        return dict(_default_facts(self))


@functools.cache
def _default_facts(operator: Operator) -> Mapping[str, FactValue]:
    parameters = operator.signature.parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    out: dict[str, FactValue] = {}
    for fact in operator.facts.values():
        try:
            out[fact.name] = fact.canonical(eval(fact.expression, {"__builtins__": {}}, dict(defaults)))
        except (NameError, AttributeError, TypeError):
            continue  # it hangs on an argument that has no default
    return out


#: Every declared operator by name. Filled by importing `te_dispatch.ops`.
OPERATORS: dict[str, Operator] = {}


def operand_facts(parameter: str, optional: bool = False) -> list[Fact]:
    """Facts of a parameter that is a tensor or a `Quantized`: its format, scaling, and whether it was given."""
    guard = f"None if {parameter} is None else " if optional else ""
    facts = [
        Fact(
            f"{parameter}.dtype",
            f"({guard}{parameter}.encoding if {parameter}.__class__ in _RECORDS else {parameter}.dtype)",
            "dtype",
            f"dtype of `{parameter}`, or its encoding if it is quantized",
        ),
        Fact(
            f"{parameter}.scaling",
            f"({guard}{parameter}.scaling if {parameter}.__class__ in _RECORDS else 'none')",
            "option",
            f"scaling of `{parameter}` if it is quantized, else `none`",
            words=("none", *OPERANDS.scalings),
        ),
    ]
    return facts + ([presence_fact(parameter)] if optional else [])


def tensor_facts(parameter: str, optional: bool = False) -> list[Fact]:
    """Facts of a parameter that is always a plain tensor."""
    guard = f"None if {parameter} is None else " if optional else ""
    facts = [Fact(f"{parameter}.dtype", f"({guard}{parameter}.dtype)", "dtype", f"dtype of `{parameter}`")]
    return facts + ([presence_fact(parameter)] if optional else [])


def presence_fact(parameter: str) -> Fact:
    return Fact(parameter, f"({parameter} is not None)", "option", f"whether `{parameter}` is given")


def quantizer_facts(parameter: str, optional: bool = True) -> list[Fact]:
    """Facts of a quantizer parameter: its kind and target encoding, None where no quantizer is given."""
    guard = f"None if {parameter} is None else " if optional else ""
    return [
        Fact(parameter, f"({guard}{parameter}.kind)", "option", f"kind of `{parameter}`", words=OPERANDS.quantizers),
        Fact(f"{parameter}.encoding", f"({guard}{parameter}.encoding)", "dtype", f"target encoding of `{parameter}`"),
        Fact(
            f"{parameter}.scaling",
            f"({guard}{parameter}.scaling)",
            "option",
            f"scaling `{parameter}` produces",
            words=OPERANDS.scalings,
        ),
    ]


def operator(
    *,
    family: str,
    version: int,
    shape: Callable[..., Any],
    device: str,
    options: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
    facts: Sequence[Fact] = (),
    companion: str | None = None,
    backward: bool = False,
    companion_facts: Callable[[CallFacts], CallFacts] | None = None,
    saved: str | None = None,
    mutates: Sequence[str] = (),
    words: Mapping[str, Sequence[str]] | None = None,
    memory: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an operator. Its name is the stub's, and the stub's annotations say what its parameters are.

    Args:
        family: the module it belongs to.
        version: raise it when the meaning of existing arguments or results changes.
        shape: same signature as the stub; returns the results for meta or fake arguments.
        device: expression for the call's device.
        options: parameters that are keyed by value and of a kind that otherwise is not (numbers and tuples of them).
        dtypes: strings whose value names a dtype.
        sizes: derived integer facts, name -> expression.
        facts: any others, and those that take the place of one that a parameter would have.
        companion, backward, companion_facts, saved, mutates: see `Operator`.
        words: option -> the values it can have beside None.
        memory: forms of parameters that differ from what `te_dispatch.core.parameters` takes them to be.

    Raises:
        ValueError: it is declared twice, or a fact is; an annotation is unknown; nothing can be known of a parameter.
    """

    def declare(stub: Callable[..., Any]) -> Callable[..., Any]:
        name, signature = stub.__name__, inspect.signature(stub)
        parameters = parameters_of(name, signature, mutates, memory or {})
        declared = [*facts, *[Fact(size, f"({expression})", "size") for size, expression in (sizes or {}).items()]]
        declared += [Fact(p, p, "option", f"the argument `{p}`") for p in options]
        declared += [Fact(p, p, "dtype", f"the argument `{p}`") for p in dtypes]
        if saved is not None:
            declared.append(Fact("saved", f"({saved})", doc="implementation whose forward saved"))
        by_name = _facts(name, parameters, [*declared, *_default_value_facts(signature)])
        for option, values in (words or {}).items():
            by_name[option] = replace(by_name[option], words=tuple(values))
        found = Operator(
            name=name,
            version=version,
            family=family,
            signature=signature,
            doc=inspect.getdoc(stub) or "",
            device=device,
            facts=by_name,
            shape=shape,
            companion=companion,
            backward=backward,
            companion_facts=companion_facts,
            saved=saved,
            mutates=tuple(mutates),
            parameters=parameters,
        )
        if OPERATORS.setdefault(name, found) is not found:
            raise ValueError(f"operator {name} is declared twice")
        return stub

    return declare


def _default_value_facts(signature: inspect.Signature) -> list[Fact]:
    """For implementations that lack a newer keyword: they serve calls that leave it at its default."""
    return [
        Fact(f"{p.name}.default", f"({p.name} {'is' if p.default is None else '=='} {p.default!r})")
        for p in signature.parameters.values()
        if p.default is not inspect.Parameter.empty
    ]


def _facts(operator: str, parameters: Mapping[str, Parameter], declared: Sequence[Fact]) -> dict[str, Fact]:
    """The facts by name: those that were declared, and those that every parameter of a kind has.

    Raises:
        ValueError: one is declared twice, or nothing is said of a parameter whose value may decide what can serve.
    """
    by_name = {fact.name: fact for fact in declared}
    if len(by_name) != len(declared):
        raise ValueError(f"{operator}: a fact is declared twice")
    found: dict[str, Fact] = {}
    for parameter in parameters.values():
        found.update((fact.name, fact) for fact in _facts_of(parameter))
    found.update(by_name)
    if unread := [name for name, p in parameters.items() if name not in found and not _facts_of(p) and not _is_free(p)]:
        raise ValueError(f"{operator}: no fact covers the parameters {', '.join(unread)}")
    return found


def _facts_of(parameter: Parameter) -> list[Fact]:
    """The facts that every parameter of its kind has."""
    name, kind, optional = parameter.name, parameter.kind, parameter.optional
    if kind in (kinds.OPERAND, kinds.RECORD):
        return operand_facts(name, optional)
    if kind == kinds.TENSOR:
        return tensor_facts(name, optional)
    if kind == kinds.QUANTIZER:
        return quantizer_facts(name, optional)
    if kind in (kinds.STRING, kinds.FLAG):
        return [Fact(name, name, "option", f"the argument `{name}`", kind == kinds.FLAG)]
    if kind == kinds.DTYPE:
        return [Fact(name, name, "dtype", f"the argument `{name}`")]
    return [presence_fact(name)] if optional and kind in (kinds.INTEGER, kinds.NUMBER) else []


def _is_free(parameter: Parameter) -> bool:
    """Whether its value never decides which implementation runs (one may still decline it)."""
    return parameter.kind in (kinds.NUMBER, kinds.INTEGER, kinds.SAVED)


def decomposes(
    name: str,
    *,
    pieces: Callable[[CallFacts], Mapping[str, Piece] | None],
    materializes: bool = False,
    simplifies: bool = False,
    label: str = "",
) -> Callable[[Callable[..., Callable[..., Any]]], Callable[..., Callable[..., Any]]]:
    """Register a decomposition of the operator `name`; decorates its `build` function."""

    def register(build: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        decomposition = Decomposition(label or build.__name__, pieces, build, materializes, simplifies)
        OPERATORS[name].decompositions.append(decomposition)
        return build

    return register
