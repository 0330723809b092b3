# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Claims about bits are judged where they can break: on many rows, beside other work, elsewhere in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.checks.sizes import enlarged
from te_dispatch.conformance.families import gemm_rows
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized

from .trials import Mistake, case_of, trial_of

NORM_BWD = case_of("rmsnorm_bwd", "plain", shape="31x257")
SOFTMAX = case_of("softmax_fwd", "plain", shape="2x16x16")


class _Alternating:
    """dgamma is summed from the other end in every other call, where there are at least 64 rows, as atomics may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        self.calls += 1
        x, dy, rstd = (arguments[name].float() for name in ("x", "dy", "rstd"))
        if x.shape[0] < 64 or self.calls % 2:
            return made
        products = (dy * x * rstd[:, None]).flip(0)
        total = torch.zeros_like(products[0])
        for row in products:
            total += row
        return made._replace(dgamma=total.to(made.dgamma.dtype))


class _OfTheLastCall:
    """Adds to the result what the call before it left in a static buffer."""

    def __init__(self) -> None:
        self.left: torch.Tensor | None = None

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        same = self.left is None or torch.equal(self.left, arguments["x"])
        self.left = arguments["x"].clone()
        return made if same else made * 1.5


class _ByThreads:
    """Sums that several threads add to, in whatever order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        self.calls += 1
        return made * 2 if torch.get_num_threads() == 3 and self.calls % 2 else made


def _by_alignment(right: Subject, arguments: Mapping[str, Any]) -> Any:
    made = right.call(arguments)
    return made if arguments["x"].data_ptr() % 32 == 0 else made * 2


@pytest.mark.parametrize(
    "case,implementation,mistake,message",
    [
        (NORM_BWD, "torch.rmsnorm_bwd", _Alternating, "with shape=516x1040: dgamma differs in run 2 of 8"),
        (SOFTMAX, "torch.softmax_fwd", _OfTheLastCall, "result differs in run"),
        (SOFTMAX, "torch.softmax_fwd", _ByThreads, "result differs from run to run with 3 threads"),
        (SOFTMAX, "torch.softmax_fwd", lambda: _by_alignment, "result differs with operands 16 bytes further"),
    ],
)
def test_a_claim_of_determinism_that_does_not_hold(case: Case, implementation: str, mistake: Any, message: str) -> None:
    find("repeatable").run(trial_of(case, implementation))
    with pytest.raises(Failure, match=message):
        find("repeatable").run(trial_of(case, implementation, mistake()))


def test_an_implementation_that_refuses_other_alignments_is_deterministic() -> None:
    def strict(right: Subject, arguments: Mapping[str, Any]) -> Any:
        if arguments["x"].data_ptr() % 32:
            raise ValueError("x: got an address that is no multiple of 32")
        return right.call(arguments)

    find("repeatable").run(trial_of(SOFTMAX, "torch.softmax_fwd", strict))


def _product(split: Callable[[int], bool]) -> Mistake:
    """Every row by itself, in fp32; for the counts of rows that `split` names, the halves of k are summed apart."""

    def product(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        a, b = (_matrix(arguments[name]) for name in "ab")
        k = a.shape[1]
        parts = (k // 2, k - k // 2) if split(a.shape[0]) else (k,)
        out = torch.zeros(made.out.shape)
        for row in range(a.shape[0]):
            start, own = 0, a[row].clone()  # PyTorch's product sums otherwise where a row begins at another alignment
            for part in parts:
                out[row] += b[:, start : start + part] @ own[start : start + part]
                start += part
        return made._replace(out=out.to(made.out.dtype))

    return product


def _matrix(x: Any) -> torch.Tensor:
    """Codes stand for a record's values: sums of them round as those do."""
    return x.row_data.float() * 0.37 if isinstance(x, Quantized) else x.float()


@pytest.mark.parametrize(
    "space,implementation,values",
    [
        ("plain", "torch.matmul", {"shape": "31x37x41", "dtype": "fp32"}),
        ("quantized", "torch.emulated_gemm", {"out_dtype": "fp32", "shape": "48x32x64"}),
    ],
)
def test_a_product_that_sums_by_row_count(space: str, implementation: str, values: dict[str, str]) -> None:
    case = case_of("gemm", space, layout="NT", values="normal", **values)
    find("batch_invariant").run(trial_of(case, implementation, _product(lambda rows: False)))
    with pytest.raises(Failure, match=r"out: \d+ rows alone differ from the same rows of a call with"):
        find("batch_invariant").run(trial_of(case, implementation, _product(lambda rows: rows < 16)))
    with pytest.raises(Failure, match="with shape=516x48x2048: out: 129 rows alone differ"):
        find("batch_invariant").run(trial_of(case, implementation, _product(lambda rows: rows > 200)))


def test_on_an_emulated_device_calls_have_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "emulated", True)
    case = case_of("gemm", "plain", layout="NT", values="normal", shape="31x37x41", dtype="fp32")
    trial = trial_of(case, "torch.matmul", _product(lambda rows: rows > 250))
    find("batch_invariant").run(trial)
    assert trial.notes == ["with up to 240 rows, of 2064: the device is emulated"]
    with pytest.raises(Failure, match="with shape=240x48x2048: out: 120 rows alone differ"):
        find("batch_invariant").run(trial_of(case, "torch.matmul", _product(lambda rows: rows > 200)))


@pytest.mark.parametrize("layout", ("NT", "TN"))
def test_half_of_a_product_of_records(layout: str) -> None:
    case = case_of("gemm", "quantized", layout=layout, copies="both", out="given", shape="48x32x64")
    arguments = trial_of(case, "torch.emulated_gemm").arguments()
    part = gemm_rows.half(arguments)
    subject = trial_of(case, "torch.emulated_gemm").subject
    whole = subject.call({**arguments, "out": None}).out
    assert torch.equal(subject.call({**part, "out": None}).out, whole[:24])
    assert part["out"].shape == (24, 32)


def test_enlarged_cases_are_valid_calls() -> None:
    for operator, space, implementation in (
        ("layernorm_fwd", "plain", "torch.layernorm_fwd"), ("softmax_bwd", "plain", "torch.softmax_bwd"),
        ("quantize", "current", "torch.quantize"), ("multi_tensor_scale", "plain", "torch.multi_tensor_scale"),
        ("rope_fwd", "dense", "torch.rope_fwd"), ("activation_bwd", "plain", "torch.activation_bwd"),
        ("attention_fwd", "plain", "torch.unfused_attention"), ("gemm", "quantized", "torch.emulated_gemm"),
    ):  # fmt: skip
        larger = enlarged(trial_of(case_of(operator, space), implementation))
        assert larger is not None
        larger.space.make(larger.case.values, Maker(larger.case, scopes.MANAGER))
    assert enlarged(trial_of(case_of("multi_tensor_quantize", "plain"), "torch.multi_tensor_quantize")) is None
