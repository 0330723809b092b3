# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The parameters of an operator: what its signature says of each, read once for all that follows from it.

These follow from it: the facts of a call (`te_dispatch.core.operator`), the test of what kinds of objects came
(`te_dispatch.core.arguments`), what tensors may look like (`te_dispatch.core.memory`), and what caches of calls compare
(`te_dispatch.ops.checks.signatures`, and those of backends).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_dispatch.core import memory as memories

#: Kinds of arguments, by the annotation that says so. An operand is a tensor or a record, a record a `Quantized`.
TENSOR, RECORD, OPERAND, QUANTIZER, SAVED = "torch.Tensor", "Quantized", "Operand", "Quantizer", "Saved"
DTYPE, STRING, FLAG, INTEGER, NUMBER = "torch.dtype", "str", "bool", "int", "float"
INTEGERS, NUMBERS = "tuple[int, int]", "tuple[float, float]"
KINDS = (TENSOR, RECORD, OPERAND, QUANTIZER, SAVED, DTYPE, STRING, FLAG, INTEGER, NUMBER, INTEGERS, NUMBERS)
#: Kinds whose arguments hold tensors that the caller laid out.
_TENSORS = frozenset((TENSOR, RECORD, OPERAND))
_SEQUENCE = re.compile(r"Sequence\[(.*)\]")


class Member(NamedTuple):
    """One of the kinds of arguments that a parameter takes: `kind` itself, or lists of it as deep as `depth`."""

    kind: str
    depth: int = 0


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operator.

    Attributes:
        name: its name.
        members: what it takes beside None; mostly one kind.
        optional: whether it takes None.
        written: whether an implementation writes to it.
        memory: the form of its tensors (`te_dispatch.core.memory`), None where it holds none.
    """

    name: str
    members: tuple[Member, ...]
    optional: bool
    written: bool
    memory: str | None

    @property
    def kind(self) -> str:
        """The kind of a parameter that takes one kind, and no lists; empty for others."""
        return self.members[0].kind if len(self.members) == 1 and self.members[0].depth == 0 else ""


def parameters_of(
    operator: str, signature: inspect.Signature, mutates: Collection[str], memory: Mapping[str, str]
) -> dict[str, Parameter]:
    """The parameters of an operator by name.

    Args:
        mutates: names of those that an implementation writes to.
        memory: the forms of those whose tensors' form is not ``written`` where they are written, else ``any``.

    Raises:
        ValueError: an annotation that says nothing known, a form of no parameter, or an unknown form.
    """
    for name, form in memory.items():
        if name not in signature.parameters or form not in memories.FORMS:
            raise ValueError(
                f"{operator}: got memory {name}={form!r}, expected a parameter and one of {list(memories.FORMS)}"
            )
    return {
        name: _parameter(operator, declared, name in mutates, memory.get(name))
        for name, declared in signature.parameters.items()
    }


def _parameter(operator: str, declared: inspect.Parameter, written: bool, form: str | None) -> Parameter:
    words = [word.strip() for word in str(declared.annotation).split("|")]
    members = tuple(_member(operator, declared, word) for word in words if word != "None")
    if form is None:
        if any(member.kind == SAVED for member in members):
            form = memories.SAVED
        elif any(member.kind in _TENSORS for member in members):
            form = memories.WRITTEN if written else memories.ANY
    return Parameter(declared.name, members, "None" in words or declared.default is None, written, form)


def _member(operator: str, declared: Any, word: str) -> Member:
    kind, depth = word, 0
    while (inner := _SEQUENCE.fullmatch(kind)) is not None:
        kind, depth = inner[1], depth + 1
    if kind not in KINDS:
        raise ValueError(
            f"{operator}: got the annotation {declared.annotation!r} for {declared.name}, expected one of "
            f"{', '.join(KINDS)}, None, Sequences of them, or a union"
        )
    return Member(kind, depth)
