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

from te_dispatch.core.facts import UNKNOWN, CallFacts, FactValue
from te_dispatch.core.memory import forms_of
from te_dispatch.core.operands import OPERANDS

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
        signature: of the stub.
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
        memory: form of each parameter that holds tensors, see `te_dispatch.core.memory`.
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
    memory: Mapping[str, str] = field(default_factory=dict)

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
    operands: Sequence[str] = (),
    tensors: Sequence[str] = (),
    quantizers: Sequence[str] = (),
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
    """Declare an operator. Its name is the stub's.

    Args:
        family: the module it belongs to.
        version: raise it when the meaning of existing arguments or results changes.
        shape: same signature as the stub; returns the results for meta or fake arguments.
        device: expression for the call's device.
        operands: parameters that are tensors or `Quantized`; tensors: plain tensors; quantizers: quantizers. Which
            are optional follows from their defaults and annotations.
        options: parameters keyed by value; dtypes: those whose value is a dtype.
        sizes: derived integer facts, name -> expression; facts: anything else.
        companion, backward, companion_facts, saved, mutates: see `Operator`.
        words: option -> the values it can have beside None.
        memory: forms of parameters that differ from what `te_dispatch.core.memory.forms_of` takes them to be.
    """
    roles = _Roles(operands, tensors, quantizers, options, dtypes, sizes or {})

    def declare(stub: Callable[..., Any]) -> Callable[..., Any]:
        name, signature = stub.__name__, inspect.signature(stub)
        found = [*roles.facts(signature), *facts, *_default_value_facts(signature)]
        if saved is not None:
            found.append(Fact("saved", f"({saved})", doc="implementation whose forward saved"))
        for option, values in (words or {}).items():
            found = [replace(f, words=tuple(values)) if f.name == option else f for f in found]
        declared = Operator(
            name=name,
            version=version,
            family=family,
            signature=signature,
            doc=inspect.getdoc(stub) or "",
            device=device,
            facts=_by_name(name, found, roles, signature),
            shape=shape,
            companion=companion,
            backward=backward,
            companion_facts=companion_facts,
            saved=saved,
            mutates=tuple(mutates),
            memory=forms_of(name, signature, mutates, memory or {}),
        )
        if OPERATORS.setdefault(name, declared) is not declared:
            raise ValueError(f"operator {name} is declared twice")
        return stub

    return declare


@dataclass(frozen=True)
class _Roles:
    """What resolution reads off an operator's parameters, and the sizes derived from them; see `operator`."""

    operands: Sequence[str]
    tensors: Sequence[str]
    quantizers: Sequence[str]
    options: Sequence[str]
    dtypes: Sequence[str]
    sizes: Mapping[str, str]

    def facts(self, signature: inspect.Signature) -> list[Fact]:
        def optional(parameter: str) -> bool:
            found = signature.parameters[parameter]
            return found.default is None or "None" in str(found.annotation)  # a required argument may be None too

        found = [fact for p in self.operands for fact in operand_facts(p, optional(p))]
        found += [fact for p in self.tensors for fact in tensor_facts(p, optional(p))]
        found += [fact for p in self.quantizers for fact in quantizer_facts(p, optional(p))]
        for p in self.options:
            boolean = "bool" in str(signature.parameters[p].annotation)
            found.append(Fact(p, p, "option", f"the argument `{p}`", boolean))
        found += [Fact(p, p, "dtype", f"the argument `{p}`") for p in self.dtypes]
        return found + [Fact(name, f"({expression})", "size") for name, expression in self.sizes.items()]

    def parameters(self) -> set[str]:
        return {*self.operands, *self.tensors, *self.quantizers, *self.options, *self.dtypes}


def _default_value_facts(signature: inspect.Signature) -> list[Fact]:
    """For implementations that lack a newer keyword: they serve calls that leave it at its default."""
    return [
        Fact(f"{p.name}.default", f"({p.name} {'is' if p.default is None else '=='} {p.default!r})")
        for p in signature.parameters.values()
        if p.default is not inspect.Parameter.empty
    ]


def _by_name(operator: str, facts: Sequence[Fact], roles: _Roles, signature: inspect.Signature) -> dict[str, Fact]:
    """The facts by name, which must be distinct and between them say something of every parameter.

    Raises:
        ValueError: they do not.
    """
    by_name = {fact.name: fact for fact in facts}
    if len(by_name) != len(facts):
        raise ValueError(f"{operator}: a fact is declared twice")
    unread = set(signature.parameters) - roles.parameters() - set(by_name) - _NEVER_READ
    if unread:
        raise ValueError(f"{operator}: no fact covers the parameters {', '.join(sorted(unread))}")
    return by_name


#: Scalars whose value never decides which implementation runs (an implementation may still decline them).
_NEVER_READ = {"alpha", "eps", "saved", "scale", "lr", "beta1", "beta2", "step", "weight_decay", "dropout_p", "limit"}


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
