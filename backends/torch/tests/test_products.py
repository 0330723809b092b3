# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is handed to PyTorch's products on a CPU with AMX units, whose library reads past rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch_torch import gemm, products

LAYOUTS = ("NT", "NN", "TN")


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The operands of each product, on a machine that says that it has AMX units."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    mm, addmm = torch.mm, torch.addmm

    def note_mm(a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
        found.append((a, b))
        return mm(a, b, **how)

    def note_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
        found.append((a, b))
        return addmm(bias, a, b, **how)

    monkeypatch.setattr(products, "AMX_UNITS", True)
    monkeypatch.setattr(torch, "mm", note_mm)
    monkeypatch.setattr(torch, "addmm", note_addmm)
    return found


def stored(rows: int, columns: int, dtype: torch.dtype, gaps: bool) -> torch.Tensor:
    whole = torch.full((rows, columns + (5 if gaps else 0)), torch.nan, dtype=dtype)
    whole[:, :columns] = torch.randint(-4, 5, (rows, columns))
    return whole[:, :columns]


def operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype, gaps: bool) -> tuple[torch.Tensor, torch.Tensor]:
    a = stored(*((k, m) if layout[0] == "T" else (m, k)), dtype, gaps)
    b = stored(*((n, k) if layout[1] == "T" else (k, n)), dtype, gaps)
    return a, b


def is_dense(x: torch.Tensor) -> bool:
    return x.is_contiguous() or x.t().is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "gaps"), [(64, False), (64, True), (41, False), (40, True), (3, False), (0, False)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_are_dense_and_of_whole_tiles(
    handed: list[tuple[torch.Tensor, torch.Tensor]],
    layout: str, dtype: torch.dtype, k: int, gaps: bool, with_bias: bool,
) -> None:  # fmt: skip
    a, b = operands(layout, 7, 10, k, dtype, gaps)
    bias = torch.ones(10, dtype=dtype) if with_bias else None
    got = gemm.matmul(a, b, layout=layout, bias=bias).out
    assert len(handed) == 1
    for x in handed[0]:
        assert x.dtype != dtype or (is_dense(x) and handed[0][0].shape[1] % 32 == 0)
        assert not x.isnan().any()
    x, y = (a.double().t() if layout[0] == "T" else a.double()), (b.double().t() if layout[1] == "T" else b.double())
    assert torch.equal(got.double(), x @ y + with_bias)  # small integers: exact in either dtype


def test_operands_that_are_read_right_are_handed_over_as_they_are(
    handed: list[tuple[torch.Tensor, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operands("NT", 7, 10, 64, torch.bfloat16, gaps=False)
    gemm.matmul(a, b, layout="NT")
    assert handed[0][0].data_ptr() == a.data_ptr() and handed[0][1].data_ptr() == b.data_ptr()
    for dtype, units in ((torch.float32, True), (torch.bfloat16, False)):
        monkeypatch.setattr(products, "AMX_UNITS", units)
        a, b = operands("NT", 7, 10, 41, dtype, gaps=True)
        gemm.matmul(a, b, layout="NT")
        assert handed[-1][0].data_ptr() == a.data_ptr() and handed[-1][1].data_ptr() == b.data_ptr()


def test_every_16_bit_product_takes_this_way(handed: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Accumulated, scaled, cast and grouped products too."""
    a, b = operands("NT", 7, 10, 41, torch.bfloat16, gaps=True)
    whole = torch.zeros(7, 10)
    gemm.matmul(a, b, layout="NT", out=whole, accumulate=True)
    gemm.matmul(a, b, layout="NT", alpha=2.0)
    gemm.matmul(a, b, layout="NT", epilogue="gelu", bias=torch.zeros(10, dtype=torch.bfloat16))
    gemm.grouped([a, a], [b, b], layout="NT")
    assert len(handed) == 5
    for x, y in handed:
        low = x.dtype in (torch.bfloat16, torch.float16)
        assert not low or (is_dense(x) and is_dense(y) and x.shape[1] % 32 == 0)


def test_a_nan_stays_in_its_row(handed: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    a, b = operands("NT", 7, 10, 41, torch.bfloat16, gaps=False)
    a[3, 0] = torch.nan
    got = gemm.matmul(a, b, layout="NT").out
    assert got[3].isnan().all() and got.isnan().sum() == 10
