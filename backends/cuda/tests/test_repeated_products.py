# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products that are made again: those of what looks like one product's operands do what the operator does.

No GPU and no library: what a product is prepared for is noted instead.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import caches
from te_dispatch.numerics.quantized import Quantized

BF16 = torch.bfloat16


def _record(rows: int, columns: int, scaling: str = "tensor") -> Quantized:
    row, column = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(columns, rows, dtype=torch.uint8)
    scales = (torch.ones(1), torch.zeros(1)) if scaling == "tensor" else (torch.ones(rows, 1), torch.ones(columns, 1))
    if scaling == "mxfp8":
        column, scales = column.t().contiguous(), (scales[0].byte(), scales[1].t().contiguous().byte())
    return Quantized(row, column, *scales, "e4m3fn", scaling, "canonical", (rows, columns), BF16, row.device)


@pytest.mark.parametrize("scaling", ["tensor", "block_1d", "mxfp8", None])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_a_planned_product_is_the_product(products: list[Any], scaling: str | None, layout: str, plan_of: Any) -> None:
    from te_dispatch_cuda import gemm

    operator = gemm.gemm_codes if scaling else gemm.gemm
    options: dict[str, Any] = {
        "layout": layout, "alpha": 1.0, "out": None, "accumulate": False, "epilogue": None, "aux": None,
        "aux_quantizer": None, "out_dtype": BF16, "out_quantizer": None, "split_accumulator": False,
    }  # fmt: skip

    def operands() -> tuple[Any, Any]:
        pair = _record(32, 32, scaling or "tensor"), _record(32, 32, scaling or "tensor")
        return pair if scaling else tuple(r.row_data.bfloat16() for r in pair)  # type: ignore[union-attr]

    bias = torch.zeros(32, dtype=BF16)
    for given_bias in (None, bias):
        varying = ("a", "b") if given_bias is None else ("a", "b", "bias")
        tensors = () if given_bias is None else (given_bias,)
        a, b = operands()
        arguments = {"a": a, "b": b, "bias": given_bias, **options}
        assert plan_of(operator)(varying, **arguments) is None  # not made yet
        operator(a, b, bias=given_bias, **options)
        call = plan_of(operator)(varying, **arguments)
        assert plan_of(operator)(varying, **{**arguments, "epilogue": "gelu"}) is None
        c, d = operands()
        products.clear()
        operator(c, d, bias=given_bias, **options)
        call(c, d, *tensors)
        (facts, expected), (same, found) = products
        assert facts is same and all(x is y for x, y in zip(expected, found, strict=True))
        products.clear()
        plan_of(operator)(("b",), **arguments)(d)  # a and the bias stay what they were
        ((one, found),) = products
        assert one is facts and found[1] is expected[1] and found[0] is not expected[0] and found[4] is given_bias
    caches.clear("te_dispatch_cuda.gemm.")  # as tuning does
    products.clear()
    call(c, d, bias)
    assert products[0][0] is not facts


def test_a_product_asks_where_scales_and_bias_lie(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is kept for aligned ones does nothing with others: then the kind of the call is found anew."""
    from te_dispatch_cuda import gemm

    calls, told = sys.modules["te_dispatch_cuda.gemm_calls"], []
    monkeypatch.setattr(calls, "_plan", lambda *facts: (SimpleNamespace(address=1), 0))
    monkeypatch.setattr(calls, "prepare", lambda *facts, aligned, **_: told.append(aligned))
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    for flags, places in ((0, {2, 3}), (gemm.UNALIGNED, {3}), (gemm.LAID_OUT, {2, 3})):
        kind = ("e4m3fn", "e4m3fn", "block_1d", "block_1d", flags, 0)
        for bias, multiple in ((None, 0), (torch.zeros(32), 16), (torch.zeros(33)[1:], 4)):
            calls.prepare_product(
                codes, codes, "NT", kind, (32, 32), 1.0, True, False, bias, BF16, 256, range(6), 6
            )  # fmt: skip
            found = {x.index: asked for x, asked in told.pop() if x.__class__ is calls.Given}
            assert found.keys() == {0, 1} | places | ({4} if multiple else set()) and found.get(4, 0) == multiple


def test_what_lies_unusually_is_kept_apart(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of less aligned operands, or with a less aligned bias, have plans of their own, which usual ones do not
    get; where only the output lies worse, the product is made with the next weaker plan."""
    from te_dispatch_cuda import gemm

    calls = sys.modules["te_dispatch_cuda.gemm_calls"]
    a, b, bias = torch.zeros(32, 32, dtype=BF16), torch.zeros(32, 32, dtype=BF16), torch.zeros(40, dtype=BF16)
    made: list[tuple[int, int]] = []
    for address, low in ((0, 0), (64, 0), (0, 2), (0, 0), (64, 0), (0, 2)):
        monkeypatch.setattr(calls, "address", lambda x, address=address: address)
        gemm.gemm(a, b, layout="NT", bias=bias[low // 2 :][:32])
        made.append(products[-1][0][10])
    assert made == [256, 64, 256] * 2
    assert len({id(facts) for facts, _ in products}) == 3
    refused: list[int] = []

    def unaligned(*problem: Any) -> Any:
        multiple = problem[10]
        return lambda *tensors: (
            refused.append(multiple) or (NotImplemented if multiple > 64 else gemm.Gemm(a, None, None))
        )

    monkeypatch.setattr(calls, "address", lambda x: 0)
    monkeypatch.setattr(gemm, "prepare_product", unaligned)
    caches.clear("te_dispatch_cuda.gemm.")
    for _ in range(2):
        assert gemm.gemm(a, b, layout="NT").out is a
    assert refused == [256, 128, 64] * 2
