# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls at the edges of the contracts that the conformance kit found answered wrongly."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import te_dispatch_torch.activation as activation  # noqa: E402
import te_dispatch_torch.gemm as gemms  # noqa: E402
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer  # noqa: E402
from te_dispatch_torch.position import rope_bwd, rope_fwd  # noqa: E402
from te_dispatch_torch.quantize import dequantize, quantize  # noqa: E402


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("epilogue", ["bgrad_a", "bgrad_b"])
def test_the_bias_gradient_sums_over_the_contracted_dimension(layout: str, epilogue: str) -> None:
    m, n, k = 3, 5, 7
    a = torch.randn((k, m) if layout[0] == "T" else (m, k))
    b = torch.randn((n, k) if layout[1] == "T" else (k, n))
    expected = a.sum(0 if layout[0] == "T" else 1) if epilogue == "bgrad_a" else b.sum(1 if layout[1] == "T" else 0)
    found = gemms.matmul(a, b, layout=layout, epilogue=epilogue)
    torch.testing.assert_close(found.dbias, expected)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (8, 0, 16), (8, 16, 0)])
@pytest.mark.parametrize("quantized", [False, True])
def test_products_without_elements(layout: str, m: int, n: int, k: int, quantized: bool) -> None:
    a = torch.ones((k, m) if layout[0] == "T" else (m, k))
    b = torch.ones((n, k) if layout[1] == "T" else (k, n))
    run = gemms.matmul
    out = torch.ones(m, n)
    if quantized:
        a, b = (quantize(x, CurrentQuantizer(), usage="both") for x in (a, b))
        run = gemms.emulated
    found = run(a, b, layout=layout, out=out, accumulate=True).out
    assert found is out and bool((out == 1).all())


def test_an_activation_gradient_without_columns() -> None:
    found = activation.activation_bwd(torch.ones(4, 0), torch.ones(4, 0), kind="gelu", with_dbias=True)
    assert found.dbias.shape == (0,)


@pytest.mark.parametrize("rope", [rope_fwd, rope_bwd])
def test_tokens_behind_the_last_sequence_need_no_angles(rope: object) -> None:
    """Their positions go on from the last sequence's, offset included, and may have left the table."""
    x, freqs = torch.randn(15, 2, 8), torch.randn(8, 1, 1, 8)
    bounds, offsets = torch.tensor([0, 5, 11], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    found = rope(x, freqs, layout="thd", cu_seqlens=bounds, offsets=offsets)  # type: ignore[operator]
    alone = rope(x[:11], freqs, layout="thd", cu_seqlens=bounds, offsets=offsets)  # type: ignore[operator]
    assert torch.equal(found[:11], alone)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_a_record_are_dealt_to_groups(layout: str, on_device: bool) -> None:
    rows, k = [3, 0, 5], 8
    a = quantize(torch.randn(sum(rows), k), CurrentQuantizer(), usage="both")
    shapes = [(count, 4) if layout == "TN" else (4, k) if layout == "NT" else (k, 4) for count in rows]
    b = [quantize(torch.randn(shape), CurrentQuantizer(), usage="both") for shape in shapes]
    splits = torch.tensor(rows) if on_device else rows
    found = gemms.grouped_device_splits([a], b, splits, layout=layout)
    parts = dequantize(a).split(rows)
    for part, weight, result in zip(parts, b, found, strict=True):
        expected = gemms.matmul(part, dequantize(weight), layout=layout).out
        torch.testing.assert_close(result, expected)


def test_rows_of_blocks_are_not_dealt() -> None:
    a = quantize(torch.randn(8, 16), BlockQuantizer(), usage="both")
    with pytest.raises(ValueError, match="a: got one tensor with block_1d scaling"):
        gemms.grouped_device_splits([a], [a, a], [4, 4], layout="NT")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_a_view_is_row_major(interleaved: bool) -> None:
    x = torch.randn(2, 8, 3, 16).transpose(0, 1)
    freqs = torch.randn(8, 1, 1, 16)
    for run in (rope_fwd, rope_bwd):
        found = run(x, freqs, interleaved=interleaved)
        assert found.is_contiguous()
        assert torch.equal(found, run(x.contiguous(), freqs, interleaved=interleaved))
