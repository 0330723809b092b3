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

from te_dispatch.numerics.quantized import Quantized

BF16 = torch.bfloat16
ONE, TWO = torch.ones(1), torch.zeros(1)


def _record(rows: int, columns: int, scaling: str = "tensor") -> Quantized:
    row, column = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(columns, rows, dtype=torch.uint8)
    scales = (ONE, TWO) if scaling == "tensor" else (torch.ones(rows, 1), torch.ones(columns, 1))
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
        assert plan_of(operator)(("a",), **arguments) is None
        assert plan_of(operator)(varying, **{**arguments, "epilogue": "gelu"}) is None
        c, d = operands()
        products.clear()
        operator(c, d, bias=given_bias, **options)
        call(c, d, *tensors)
        (facts, expected), (same, found) = products
        assert facts is same and all(x is y for x, y in zip(expected, found, strict=True))
    elsewhere = torch.zeros(33, dtype=BF16)[1:]  # the bias less aligned: another key
    products.clear()
    call(c, d, elsewhere)
    assert products[0][1][4] is elsewhere and products[0][0] is not facts
    gemm.CALLS.clear()  # as tuning does
    products.clear()
    call(c, d, bias)
    assert products[0][0] is not facts


def test_a_product_of_blocks_asks_where_its_scales_lie(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is kept for aligned scales does nothing with others: then the kind of the call is found anew."""
    from te_dispatch_cuda import gemm

    calls, told = sys.modules["te_dispatch_cuda.gemm_calls"], []
    monkeypatch.setattr(calls, "_plan", lambda *facts: (SimpleNamespace(address=1), 0))
    monkeypatch.setattr(calls, "prepare", lambda *facts, aligned, **_: told.append([x[0] for x in aligned]))
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    for flags, places in ((0, {2, 3}), (gemm.UNALIGNED, {3}), (gemm.LAID_OUT, {2, 3})):
        kind = ("e4m3fn", "e4m3fn", "block_1d", "block_1d", flags, 0)
        calls.prepare_product(codes, codes, "NT", kind, (32, 32), 1.0, True, False, None, BF16, 256)
        assert {x.index for x in told.pop() if x.__class__ is calls.Given} == {0, 1} | places
