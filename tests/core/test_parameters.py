# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What an operator's signature says of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import te_dispatch.ops.declared  # noqa: F401  # the operators
from te_dispatch.core import memory
from te_dispatch.core import parameters as kinds
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.parameters import Member, Parameter, parameters_of

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Operand, Quantized
    from te_dispatch.numerics.quantizers import Quantizer
    from te_dispatch.ops.results import Saved


def stub(
    a: Operand,
    splits: Sequence[int] | torch.Tensor | None,
    saved: Saved,
    *,
    out: torch.Tensor | None = None,
    record: Quantized,
    lists: Sequence[Sequence[float]],
    xs: Sequence[torch.Tensor] | None = None,
    quantizer: Quantizer | None = None,
    window: tuple[int, int] | None = None,
    alpha: float = 1.0,
    late: str | None = None,
) -> None: ...


def parsed(function: Any = stub, mutates: Sequence[str] = (), **memory: str) -> Mapping[str, Parameter]:
    return parameters_of("op", inspect.signature(function), mutates, memory)


def test_annotations_say_kinds_and_what_may_be_none() -> None:
    found = parsed()
    assert {name: p.members for name, p in found.items()} == {
        "a": (Member(kinds.OPERAND),),
        "splits": (Member(kinds.INTEGER, 1), Member(kinds.TENSOR)),
        "saved": (Member(kinds.SAVED),),
        "out": (Member(kinds.TENSOR),),
        "record": (Member(kinds.RECORD),),
        "lists": (Member(kinds.NUMBER, 2),),
        "xs": (Member(kinds.TENSOR, 1),),
        "quantizer": (Member(kinds.QUANTIZER),),
        "window": (Member(kinds.INTEGERS),),
        "alpha": (Member(kinds.NUMBER),),
        "late": (Member(kinds.STRING),),
    }
    assert {name for name, p in found.items() if p.optional} == {"splits", "out", "xs", "quantizer", "window", "late"}
    assert (found["a"].kind, found["splits"].kind, found["xs"].kind) == (kinds.OPERAND, "", "")


def test_tensors_have_a_form() -> None:
    found = parsed(mutates=("out", "quantizer.amax"), a=memory.ROWS)
    assert {name: p.memory for name, p in found.items() if p.memory} == {
        "a": memory.ROWS, "splits": memory.ANY, "saved": memory.SAVED, "out": memory.WRITTEN, "record": memory.ANY,
        "xs": memory.ANY,
    }  # fmt: skip
    assert [name for name, p in found.items() if p.written] == ["out"]


@pytest.mark.parametrize("form", [{"b": memory.ROWS}, {"a": "dense"}])
def test_a_form_of_nothing_and_an_unknown_one_are_refused(form: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"op: got memory .* expected a parameter and one of"):
        parsed(**form)


@pytest.mark.parametrize("annotation", ["object", "Sequence[bytes]", "torch.Tensor | complex", "list[int]"])
def test_an_annotation_that_says_nothing_known_is_refused(annotation: str) -> None:
    def odd(x):  # type: ignore[no-untyped-def]
        pass

    odd.__annotations__["x"] = annotation
    with pytest.raises(ValueError, match=r"op: got the annotation .* for x, expected one of torch\.Tensor, "):
        parsed(odd)


def test_every_operator_says_what_its_parameters_are() -> None:
    for operator in OPERATORS.values():
        assert list(operator.parameters) == list(operator.signature.parameters)
        for parameter in operator.parameters.values():
            assert parameter.members and parameter.written == (parameter.name in operator.mutates)
