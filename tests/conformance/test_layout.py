# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands as callers have them: what each operator allows, and kernels that take memory for granted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import arranging
from te_dispatch.conformance.arranging import Arranged
from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.checks.layout import _equal, _row
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.core.errors import Declined
from te_dispatch.core.memory import FORMS
from te_dispatch.core.operator import OPERATORS
from tests.conformance.trials import Mistake, case_of, trial_of

Given = Mapping[str, Any]
CHECKS = ("strided", "offset", "permuted", "expanded", "tracked")
GEMM, NORM_BWD = ("gemm", "torch.matmul"), ("rmsnorm_bwd", "torch.rmsnorm_bwd")


def _run(check: str, one: tuple[str, str], kernel: Mistake | None = None, space: str = "plain", **values: str) -> Any:
    trial = trial_of(case_of(one[0], space, **values), one[1], kernel)
    find_check(check).run(trial)
    return trial


def _flat(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a pointer and the sizes."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def _reads_as_if_dense(*names: str) -> Mistake:
    def kernel(right: Subject, given: Given) -> Any:
        return right.call({n: _flat(v) if n in names and v is not None else v for n, v in given.items()})

    return kernel


def _reads_from_the_start(*names: str) -> Mistake:
    """The storage's first element instead of the tensor's, as a rounded-down vector load does."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(x.shape, x.stride(), 0)

    def kernel(right: Subject, given: Given) -> Any:
        return right.call({n: first(v) if n in names and v is not None else v for n, v in given.items()})

    return kernel


def test_every_tensor_of_an_operator_has_a_form() -> None:
    for operator in OPERATORS.values():
        tensors = {
            name
            for name, parameter in operator.signature.parameters.items()
            if any(kind in str(parameter.annotation) for kind in ("Tensor", "Operand", "Quantized", "Saved"))
        }
        assert set(operator.memory) == tensors, operator.name
        assert set(operator.memory.values()) <= set(FORMS)
        assert all(form == "written" for name, form in operator.memory.items() if name in operator.mutates)


@pytest.mark.parametrize("plan", [arranging.strided, arranging.sliced, arranging.offset, arranging.permuted])
@pytest.mark.parametrize("form", ["any", "rows", "written"])
def test_an_arrangement_keeps_the_values(plan: Any, form: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    arranged = Arranged({"x": x}, {"x": form}, plan)
    found = arranged.arguments["x"]
    assert torch.equal(found, x) and arranged.changed == ["x"] and not arranged.written_around()
    assert form != "rows" or found.stride(-1) == 1
    assert found.storage_offset() or not found.is_contiguous()
    found.zero_()
    assert not arranged.written_around()
    found.as_strided((found.untyped_storage().nbytes() // 4,), (1,), 0).fill_(1.0)
    assert arranged.written_around()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("one", [GEMM, NORM_BWD, ("layernorm_fwd", "torch.layernorm_fwd")])
def test_sound_kernels(check: str, one: tuple[str, str]) -> None:
    _run(check, one)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("check", ["strided", "permuted", "expanded"])
def test_rows_that_are_taken_to_be_adjacent(check: str, name: str) -> None:
    with pytest.raises((Failure, RuntimeError), match=r"out|bounds"):
        _run(check, GEMM, _reads_as_if_dense(name))


@pytest.mark.parametrize("name", ["bias", "a"])
def test_operands_that_are_taken_to_be_aligned(name: str) -> None:
    with pytest.raises(Failure, match="out"):
        _run("offset", GEMM, _reads_from_the_start(name), bias="same")


@pytest.mark.parametrize("dropped", [slice(1, None), slice(None, -1)], ids=["first", "last"])
def test_ends_that_are_left_out_of_a_maximum_where_addresses_are_odd(dropped: slice) -> None:
    """Unless it is the largest, an element that was not looked at does not show."""

    def kernel(right: Subject, given: Given) -> Any:
        x = given["x"]
        return right.call({**given, "x": x.reshape(-1)[dropped] if x.data_ptr() % 16 else x})

    with pytest.raises(Failure, match="result"):
        _run("offset", ("compute_amax", "torch.compute_amax"), kernel)


def test_vectors_that_reach_beyond_a_rows_end() -> None:
    """They fit in behind the rows of a slice only, and are read where rows are aligned only."""

    def kernel(right: Subject, given: Given) -> Any:
        x = given["x"]
        whole = -(-x.shape[-1] // 8) * 8
        if x.ndim < 2 or x.stride(-2) % 8 or x.stride(-2) < whole:
            return right.call(given)
        return right.call({**given, "x": x.as_strided((x.shape[0] - 1, whole), x.stride())})

    with pytest.raises(Failure, match="with x so: result"):
        _run("strided", ("compute_amax", "torch.compute_amax"), kernel, shape="33x65")


@pytest.mark.parametrize("check", ["permuted", "expanded"])
def test_a_vector_that_is_taken_to_be_dense(check: str) -> None:
    with pytest.raises((Failure, RuntimeError), match=r"dx|bounds"):
        _run(check, NORM_BWD, _reads_as_if_dense("gamma"))


def test_a_scale_that_is_a_view_of_a_larger_tensor() -> None:
    def kernel(right: Subject, given: Given) -> Any:
        scale = given["quantizer"].scale
        scale.copy_(scale.as_strided((1,), (1,), 0))
        return right.call(given)

    with pytest.raises(Failure, match=r"row_data|scale"):
        _run("offset", ("quantize", "torch.quantize"), kernel, "delayed")


@pytest.mark.parametrize("out", ["given", "added"])
def test_an_output_that_is_written_between_its_rows(out: str) -> None:
    def kernel(right: Subject, given: Given) -> Any:
        made = right.call({**given, "out": given["out"].clone()})
        whole = given["out"]
        rows, columns = whole.shape
        whole.as_strided((rows, min(columns + 1, whole.stride(0))), whole.stride()).fill_(0)
        whole.copy_(made.out)
        return made._replace(out=whole)

    with pytest.raises(Failure, match="wrote 31 elements between those of out"):
        _run("strided", GEMM, kernel, out=out)
    _run("offset", GEMM, kernel, out=out)


def test_an_output_whose_rows_are_taken_to_be_adjacent() -> None:
    def kernel(right: Subject, given: Given) -> Any:
        flat = _flat(given["out"])
        return right.call({**given, "out": flat})._replace(out=given["out"])

    with pytest.raises(Failure, match=r"out|between"):
        _run("strided", GEMM, kernel, out="given")


def test_a_forward_may_refuse_and_what_it_serves_is_judged_all_the_same() -> None:
    def refuses(right: Subject, given: Given) -> Any:
        if not given["a"].is_contiguous():
            raise Declined("a has gaps")
        return right.call(given)

    def refuses_and_is_wrong(right: Subject, given: Given) -> Any:
        if not given["a"].is_contiguous():
            raise Declined("a has gaps")
        return right.call({**given, "b": _flat(given["b"])})

    assert "a has gaps" in _run("strided", GEMM, refuses).notes[0]
    with pytest.raises(Failure, match="out"):
        _run("strided", GEMM, refuses_and_is_wrong)


def test_a_backward_may_not_refuse() -> None:
    def refuses(right: Subject, given: Given) -> Any:
        if not given["dy"].is_contiguous():
            raise Declined("dy has gaps")
        return right.call(given)

    with pytest.raises(Failure, match="a backward must serve"):
        _run("strided", NORM_BWD, refuses)
    with pytest.raises(Failure, match="a backward must serve"):
        _run("expanded", NORM_BWD, refuses)


def test_operands_that_require_gradients() -> None:
    def as_numpy(right: Subject, given: Given) -> Any:
        given["a"].numpy()
        return right.call(given)

    def recorded(right: Subject, given: Given) -> Any:
        with torch.enable_grad():
            made = right.call(given)
            return made._replace(out=made.out + 0 * given["a"].sum().to(made.out.dtype))

    def recorded_in_out(right: Subject, given: Given) -> Any:
        made = right.call(given)
        given["out"].add_(0 * given["a"].sum().to(given["out"].dtype))  # outside of no_grad, in the caller's mode
        return made

    with pytest.raises(RuntimeError, match="requires grad"):
        _run("tracked", GEMM, as_numpy, dtype="fp32")
    with pytest.raises(Failure, match="out requires a gradient after the call"):
        _run("tracked", GEMM, recorded_in_out, dtype="fp32", out="given", values="normal")
    with pytest.raises(Failure, match="requires a gradient"):
        _run("tracked", GEMM, recorded)


_HOLES = (
    ("ragged", {"lengths": "67:5", "gaps": "some"}),
    ("masked", {"layout": "bshd", "mask": "padding", "valid": "ragged"}),
    ("masked", {"layout": "sbhd", "mask": "padding", "valid": "zero", "shape": "3x16x16"}),
)


@pytest.mark.parametrize("hole", ["nan", "inf"])
@pytest.mark.parametrize("space, values", _HOLES)
@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
def test_one_row_for_all_is_not_what_lies_between_sequences(
    operator: str, space: str, values: dict[str, str], hole: str
) -> None:
    """With NaN in every valid row there would be nothing to tell a right kernel by."""
    made: list[torch.Tensor] = []

    def kernel(right: Subject, given: Given) -> Any:
        assert given["q"].stride(0) == 0 or given["k"].stride(0) == 0
        result = right.call(given)
        made.append(result.out if operator.endswith("fwd") else result.dv)
        return result

    one = operator, "torch.unfused_attention" + ("_bwd" if operator.endswith("bwd") else "")
    _run("expanded", one, kernel, space, hole=hole, **values)
    assert made and all(bool(x.isfinite().all()) and bool(x.any()) for x in made)
    with pytest.raises((Failure, RuntimeError), match=r"out|dq|bounds"):
        _run("expanded", one, _reads_as_if_dense("k", "v"), space, hole=hole, **values)


def test_the_row_that_is_expanded() -> None:
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([[nan, 1.0, -inf, nan], [2.0, 3.0, inf, 4.0], [5.0, 6.0, nan, 7.0]])
    expected = torch.tensor([[2.0, 1.0, -inf, 4.0]])
    assert torch.equal(_row(x), expected) and torch.equal(_equal(x, "any"), expected.expand(3, 4))
    whole = torch.tensor([[True, False], [False, True]])
    assert torch.equal(_row(whole), whole[:1]) and _row(torch.empty(3, 0)).shape == (1, 0)
