# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations that return something else than their operator promises."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.errors import Declined, DispatchError, PolicyError
from te_dispatch.core.manager import OpManager
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.ops import results
from tests.core.toy import answering, backend, installed, kernel

A, B = torch.ones(4, 8), torch.ones(2, 8)
GOOD = torch.zeros(4, 2)
CHECKING = {"TE_DISPATCH_CHECK_RESULTS": "1"}


def manager(op: str, answer: Any, environ: dict[str, str] | None = None) -> OpManager:
    return OpManager(installed(backend("zeta", kernel(op, "k", answering(op, answer)))), environ=environ or {})


@pytest.mark.parametrize(
    ("op", "answer", "shown"),
    [
        ("gemm", None, "zeta.k returned None from gemm, which returns Gemm"),
        ("gemm", GOOD, "zeta.k returned a Tensor from gemm, which returns Gemm"),
        ("gemm", (GOOD, None, None), "zeta.k returned a tuple from gemm"),
        ("compute_amax", None, "zeta.k returned None from compute_amax, which returns torch.Tensor"),
        ("compute_amax", (A,), "zeta.k returned a tuple from compute_amax"),
        ("multi_tensor_scale", 5, "zeta.k returned 5 from multi_tensor_scale, which returns None"),
    ],
)
def test_a_result_of_another_class_names_implementation_and_operator(op: str, answer: Any, shown: str) -> None:
    m = manager(op, answer)
    # Observed calls took another way, past the check.
    for scope in (nullcontext(), m.observe(lambda *told: None)):
        with pytest.raises(DispatchError) as caught, scope:
            if op == "gemm":
                m.ops.gemm(A, B, layout="NT")
            elif op == "compute_amax":
                m.ops.compute_amax(A)
            else:
                m.ops.multi_tensor_scale([A], [A], 2.0)
        assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            results.Gemm(torch.zeros(2, 4), None, None),
            "gemm.out is torch.float32 (2, 4) on cpu, expected torch.float32",
        ),
        (results.Gemm(GOOD.bfloat16(), None, None), "gemm.out is torch.bfloat16 (4, 2) on cpu, expected torch.float32"),
        (results.Gemm(GOOD.to("meta"), None, None), "gemm.out is torch.float32 (4, 2) on meta, expected"),
        (results.Gemm(None, None, None), "gemm.out is None, expected torch.float32 (4, 2) on cpu"),
        (results.Gemm(GOOD, GOOD, None), "gemm.aux is torch.float32 (4, 2) on cpu, expected None"),
    ],
    ids=["shape", "dtype", "device", "absent", "not asked for"],
)
def test_every_result_is_checked_on_request(answer: results.Gemm, problem: str) -> None:
    m = manager("gemm", answer, CHECKING)
    for _ in range(2):
        with pytest.raises(DispatchError, match="TE_DISPATCH_CHECK_RESULTS=1") as caught:
            m.ops.gemm(A, B, layout="NT")
        assert str(caught.value).startswith(f"zeta.k: {problem}")
    assert manager("gemm", answer).ops.gemm(A, B, layout="NT") is answer, "not asked for"


def test_a_result_that_goes_wrong_later_is_found_too() -> None:
    given = iter((results.Gemm(GOOD, None, None), results.Gemm(None, None, None)))

    def gemm(
        a: Any, b: Any, *, layout: Any, alpha: Any = 1.0, out: Any = None, accumulate: Any = False, bias: Any = None,
        epilogue: Any = None, aux: Any = None, aux_quantizer: Any = None, out_dtype: Any = None,
        out_quantizer: Any = None, split_accumulator: Any = None,
    ) -> Any:  # fmt: skip
        if layout == "NN":
            raise Declined("not NN")
        return next(given)

    m = OpManager(installed(backend("zeta", kernel("gemm", "k", gemm))), environ=CHECKING)
    assert m.ops.gemm(A, B, layout="NT").out is GOOD
    with pytest.raises(DispatchError, match=r"zeta\.k: gemm\.out is None"):
        m.ops.gemm(A, B, layout="NT")
    with pytest.raises(DispatchError, match="every candidate declined"):
        m.ops.gemm(A, B, layout="NN")


def test_the_format_of_a_quantized_result_is_checked() -> None:
    def quantized(encoding: str, **copies: torch.Tensor) -> Quantized:
        scale = torch.ones(1)
        row, col, device = copies.get("row"), copies.get("col"), torch.device("cpu")
        return Quantized(row, col, scale, None, encoding, "tensor", "canonical", (4, 8), torch.float32, device)

    row = torch.zeros(4, 8, dtype=torch.uint8)
    for answer, problem in (
        (quantized("e5m2", row=row), "quantize is e5m2 (4, 8)"),
        (quantized("e4m3fn", col=row.t()), "with col data, expected"),
    ):
        m = manager("quantize", answer, CHECKING)
        with pytest.raises(DispatchError) as caught:
            m.ops.quantize(A, CurrentQuantizer(), usage="row")
        assert problem in str(caught.value)


def test_the_variable_is_read_strictly_and_again_on_reload() -> None:
    environ = {"TE_DISPATCH_CHECK_RESULTS": "yes"}
    answer = results.Gemm(GOOD.bfloat16(), None, None)
    m = manager("gemm", answer, environ)
    with pytest.raises(PolicyError, match="TE_DISPATCH_CHECK_RESULTS=yes: expected 0 or 1"):
        m.ops.gemm(A, B, layout="NT")
    for value, fails in (("0", False), ("1", True), ("0", False)):
        environ["TE_DISPATCH_CHECK_RESULTS"] = value
        m.reload_environment()
        if fails:
            with pytest.raises(DispatchError, match="bfloat16"):
                m.ops.gemm(A, B, layout="NT")
        else:
            assert m.ops.gemm(A, B, layout="NT") is answer
