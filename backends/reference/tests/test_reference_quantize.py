# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The cast operators' arguments: outputs, flags, lists, bias gradients, empty tensors, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.ops import alloc
from te_dispatch.ops.shapes import empty_quantized
from te_dispatch_reference.quantize import (
    dequantize,
    multi_tensor_quantize,
    quantize,
    quantize_dbias,
    split_quantize,
)

TENSORS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
QUANTIZERS = [
    DelayedQuantizer(scale=torch.tensor([3.0])),
    CurrentQuantizer("e5m2"),
    BlockQuantizer(),
    BlockQuantizer(two_d=True),
    MXFP8Quantizer(),
    NVFP4Quantizer(),
    NVFP4Quantizer(two_d=True),
]
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.kind}-{q.scaling}")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same(a: Quantized, b: Quantized) -> bool:
    pairs = [(getattr(a, n), getattr(b, n)) for n in TENSORS]
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs)


@every_quantizer
@pytest.mark.parametrize("shape", [(3, 5, 33), (0, 16), (4, 0), (17,), (1, 1)])
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_results_have_the_shapes_of_the_shape_function(
    quantizer: Quantizer, shape: tuple[int, ...], usage: str
) -> None:
    x = randn(*shape)
    made = quantize(x, quantizer, usage=usage)
    expected = empty_quantized(shape, quantizer, usage, x.dtype, x.device)
    for name in TENSORS:
        found, wanted = getattr(made, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        assert found is None or (found.shape == wanted.shape and found.dtype == wanted.dtype), name
    assert (made.shape, made.dtype, made.encoding, made.scaling) == (
        shape,
        x.dtype,
        quantizer.encoding,
        quantizer.scaling,
    )
    assert dequantize(made).shape == shape


@every_quantizer
def test_every_output_comes_from_the_allocator_under_its_role(quantizer: Quantizer) -> None:
    roles = []

    def record(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        roles.append(role)
        return torch.empty(shape, dtype=dtype, device=device)

    before = alloc.set_allocator(record)
    try:
        made = quantize(randn(4, 32), quantizer, usage="both")
        count = len(roles)
        assert quantize(randn(4, 32), quantizer, usage="both", out=made) is made
    finally:
        alloc.set_allocator(before)
    distinct = {id(getattr(made, n)): n for n in reversed(TENSORS) if getattr(made, n) is not None}
    assert sorted(roles[:count]) == sorted(distinct.values())
    assert len(roles) == count, "what goes into `out` is no result of its own"


@every_quantizer
def test_strides_and_dtypes_do_not_matter(quantizer: Quantizer) -> None:
    x = randn(32, 48).bfloat16()
    assert same(quantize(x, quantizer, usage="both"), quantize(x.float(), quantizer, usage="both"))
    wide = torch.zeros(32, 96).bfloat16()
    wide[:, :48] = x
    assert same(quantize(wide[:, :48], quantizer, usage="both"), quantize(x, quantizer, usage="both"))


@every_quantizer
def test_out_and_noop_flag(quantizer: Quantizer) -> None:
    x = randn(32, 48)
    out = quantize(torch.ones_like(x), quantizer, usage="both")
    before = quantize(torch.ones_like(x), quantizer, usage="both")
    assert quantize(x, quantizer, usage="both", out=out, noop_flag=torch.ones(1)) is out and same(out, before)
    assert quantize(x, quantizer, usage="both", out=out, noop_flag=torch.zeros(1)) is out
    assert same(out, quantize(x, quantizer, usage="both"))


def test_a_skipped_cast_records_no_amax() -> None:
    amax = torch.zeros(1)
    quantizer = DelayedQuantizer(scale=torch.ones(1), amax=amax)
    out = quantize(torch.zeros(2, 2), quantizer, usage="row")
    quantize(torch.full((2, 2), 5.0), quantizer, usage="row", out=out, noop_flag=torch.ones(1))
    assert amax.item() == 0
    quantize(torch.full((2, 2), 5.0), quantizer, usage="row", out=out, noop_flag=torch.zeros(1))
    assert amax.item() == 5


def test_dequantize_special_values_and_dtypes() -> None:
    x = torch.tensor([[1.0, -2.0, math.nan, math.inf, -0.0]])
    made = quantize(x, DelayedQuantizer(scale=torch.ones(1)), usage="both")
    for dtype in (None, torch.bfloat16, torch.float16):
        values = dequantize(made, dtype=dtype)
        assert values.dtype == (dtype or torch.float32)
        torch.testing.assert_close(
            values.float(), torch.tensor([[1, -2, math.nan, 448, -0.0]]), equal_nan=True, rtol=0, atol=0
        )
        assert values[0, 4].signbit()
    made.row_data = None
    assert dequantize(made).shape == (1, 5)


def test_dbias_is_summed_before_rounding() -> None:
    x = torch.cat([torch.full((1, 2, 3), 256.0), torch.full((600, 2, 3), 1.0)]).bfloat16()
    made = quantize_dbias(x, CurrentQuantizer(), usage="row")
    assert made.dbias.dtype == torch.bfloat16 and made.dbias.tolist() == [1712.0] * 3
    assert same(made.quantized, quantize(x, CurrentQuantizer(), usage="row"))
    assert quantize_dbias(x, CurrentQuantizer(), usage="row", bias_dtype=torch.float32).dbias.dtype == torch.float32
    assert quantize_dbias(torch.zeros(0, 4), CurrentQuantizer(), usage="row").dbias.tolist() == [0.0] * 4


def test_lists_equal_single_casts() -> None:
    x = randn(9, 32)
    quantizers = [CurrentQuantizer(epsilon=e) for e in (0.0, 1.0, 100.0)]
    parts = x.split([4, 0, 5])
    expected = [quantize(p, q, usage="both") for p, q in zip(parts, quantizers)]
    split = split_quantize(x, [4, 0, 5], quantizers, usage="both")
    multi = multi_tensor_quantize(parts, quantizers, usage="both")
    assert all(same(a, e) and same(b, e) for a, b, e in zip(split, multi, expected))


X = torch.ones(2, 32)
ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("usage: got 'rows'", {"usage": "rows"}),
    ("x: got dtype torch.float64", {"x": X.double()}),
    ("x: got list", {"x": [1.0]}),
    ("x: got a tensor without dimensions", {"x": torch.ones(())}),
    ("noop_flag: given without out", {"noop_flag": torch.zeros(1)}),
    ("amax: given with a block quantizer", {"quantizer": BlockQuantizer(), "amax": torch.ones(1)}),
    ("out: got e5m2, tensor", {"out": quantize(X, CurrentQuantizer("e5m2"), usage="row")}),
    ("out: has no row-wise copy", {"out": quantize(X, CurrentQuantizer(), usage="column")}),
    (r"out: got shape \(2, 16\)", {"out": quantize(X[:, :16], CurrentQuantizer(), usage="row")}),
    ("quantizer: got str", {"quantizer": "fp8"}),
]


@pytest.mark.parametrize(("message", "wrong"), ERRORS, ids=[e[0] for e in ERRORS])
def test_errors_name_the_argument(message: str, wrong: dict[str, Any]) -> None:
    arguments = {"x": X, "quantizer": CurrentQuantizer(), "usage": "row", **wrong}
    with pytest.raises((TypeError, ValueError), match=message):
        quantize(arguments.pop("x"), arguments.pop("quantizer"), **arguments)


def test_more_errors() -> None:
    with pytest.raises(ValueError, match=r"rng_state: got dtype torch.float32"):
        quantize(X, CurrentQuantizer(), usage="row", rng_state=torch.zeros(2))
    with pytest.raises(ValueError, match=r"splits: got \[1\]"):
        split_quantize(X, [1], [CurrentQuantizer()], usage="row")
    with pytest.raises(ValueError, match="x: got shape"):
        split_quantize(X[0], [2], [CurrentQuantizer()], usage="row")
    with pytest.raises(ValueError, match="quantizers: got 1, expected 2"):
        split_quantize(X, [1, 1], [CurrentQuantizer()], usage="row")
    with pytest.raises(ValueError, match="expected one kind and encoding"):
        multi_tensor_quantize([X, X], [CurrentQuantizer(), MXFP8Quantizer()], usage="row")
    with pytest.raises(ValueError, match="xs: got an empty list"):
        multi_tensor_quantize([], [], usage="row")
    amax = torch.zeros(1)
    with pytest.raises(ValueError, match=r"xs\[1\]: got dtype"):
        quantizer = DelayedQuantizer(scale=torch.ones(1), amax=amax)
        multi_tensor_quantize([X, X.int()], [quantizer, quantizer], usage="row")
    assert amax.item() == 0
    with pytest.raises(ValueError, match=r"dtype: got torch\.int8"):
        dequantize(quantize(X, CurrentQuantizer(), usage="row"), dtype=torch.int8)


def test_common_portability_reaches_every_cast() -> None:
    x = torch.tensor([[-1e-30, 1.0, 400.0]])
    one = torch.ones(1)
    fnuz = quantize(x, DelayedQuantizer("e4m3fnuz", common=True, scale=one), usage="row")
    ocp = quantize(x, DelayedQuantizer("e4m3fn", common=True, scale=one), usage="row")
    np.testing.assert_array_equal(dequantize(fnuz), [[0.0, 1.0, 224.0]])
    np.testing.assert_array_equal(dequantize(ocp), [[0.0, 1.0, 400.0 // 32 * 32]])
    assert fnuz.row_data[0, 0] == 0 and ocp.row_data[0, 0] == 0
