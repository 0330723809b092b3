# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What grouped products hand to the library. No GPU and no library: addresses are noted instead."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("te_dispatch_cuda._native")

from te_dispatch.numerics.quantized import Quantized  # noqa: E402
from te_dispatch_cuda import gemm_grouped  # noqa: E402
from te_dispatch_cuda.gemm_calls import CODES  # noqa: E402


class Noted:
    """In place of the native module."""

    def gemm_run_grouped(
        self, plans: Any, index: int, stream: int, a: Any, b: Any, a_scale: Any, b_scale: Any, out: Any, bias: Any,
        workspace: int,
    ) -> None:  # fmt: skip
        self.addresses = [*a, *b, *a_scale, *b_scale, *out]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    found = Noted()
    monkeypatch.setattr(gemm_grouped, "_native", found)
    monkeypatch.setattr(gemm_grouped, "stream_of", lambda index: 0)
    monkeypatch.setattr(gemm_grouped, "problem_of", lambda *operands, **options: None)
    monkeypatch.setattr(gemm_grouped, "make", lambda key, problem: ("plan", 0))
    monkeypatch.setattr(gemm_grouped, "PLANS", {})
    return found


def _at(x: torch.Tensor, place: int) -> torch.Tensor:
    """A copy that starts so many elements behind a multiple of 64 bytes."""
    room = torch.empty(x.numel() + 64, dtype=x.dtype)
    start = -room.data_ptr() % 64 // x.element_size() + place
    return room[start : start + x.numel()].view(x.shape).copy_(x)


def _record(rows: int, columns: int, codes: int, scales: int) -> Quantized:
    row = _at(torch.zeros(rows, columns, dtype=torch.uint8), codes)
    column = _at(torch.zeros(columns, rows, dtype=torch.uint8), codes)
    scale = _at(torch.ones(1), scales)
    return Quantized(
        row, column, scale, scale, "e4m3fn", "tensor", "canonical", (rows, columns), torch.bfloat16, row.device
    )


@pytest.mark.parametrize(("codes", "scales", "out"), [(0, 0, 0), (0, 1, 0), (3, 0, 0), (16, 2, 0), (0, 0, 1)])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_codes_scales_and_results_start_where_cublaslt_reads_and_writes_them(
    codes: int, scales: int, out: int, layout: str, noted: Noted
) -> None:
    a, b = ([_record(32, 32, codes, scales) for _ in range(2)] for _ in "ab")
    results = [_at(torch.ones(32, 32), out) for _ in range(2)]
    gemm_grouped.grouped_gemm(a, b, layout=layout, out=results, accumulate=True)
    assert len(noted.addresses) == 10 and not [x for x in noted.addresses if x % CODES]
    in_place = [results[0].data_ptr(), results[1].data_ptr()]
    assert (noted.addresses[-2:] == in_place) == (out == 0)
    assert all(bool((x == 1).all()) for x in results), "what is accumulated into comes back"
