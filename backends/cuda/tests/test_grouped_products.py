# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What grouped products of codes hand to the library: cuBLASLt refuses FP8 operands with one scale each, their scales
and their outputs at addresses that are not multiples of 16 bytes.

No GPU and no library: the addresses of a launch are noted, with what is found there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from te_dispatch.numerics.quantized import Quantized

M, N, K = 16, 32, 64


class Product(NamedTuple):
    """One group of a launch: its plan's problem, addresses of a, b, their scales and the output, and both scales."""

    problem: Any
    a: int
    b: int
    a_scale: int
    b_scale: int
    out: int
    scales: tuple[float, float]


@pytest.fixture
def launched(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Every group that is launched; a product writes 7.0 to its output's first element, which is fp32."""
    from te_dispatch_cuda import gemm_grouped

    made: list[Product] = []

    def run(plans: Any, device: int, stream: int, *columns: Any) -> None:
        for plan, a, b, a_scale, b_scale, out, _bias in zip(plans, *columns[:6], strict=True):
            scales = tuple(ctypes.c_float.from_address(at).value for at in (a_scale, b_scale))
            made.append(Product(plan, a, b, a_scale, b_scale, out, scales))  # type: ignore[arg-type]
            if out:  # else of no rows
                ctypes.c_float.from_address(out).value = 7.0

    monkeypatch.setattr(gemm_grouped, "_native", SimpleNamespace(gemm_run_grouped=run))
    monkeypatch.setattr(gemm_grouped, "stream_of", lambda index: 0)
    monkeypatch.setattr(gemm_grouped, "PLANS", {})
    monkeypatch.setattr(gemm_grouped, "make", lambda key, problem: (problem, 0))
    return made


def _record(rows: int, scale: float = 1.0, data: torch.Tensor | None = None, **fields: Any) -> Quantized:
    data = torch.zeros(rows, K, dtype=torch.uint8) if data is None else data
    given = {"row_scale_inv": torch.tensor([scale]), "scaling": "tensor", **fields}
    return Quantized(
        data, None, col_scale_inv=None, encoding="e4m3fn", scale_layout="canonical", shape=tuple(data.shape),
        dtype=torch.bfloat16, device=data.device, **given,
    )  # fmt: skip


def _product(a: Quantized, b: Quantized, **options: Any) -> list[torch.Tensor]:
    from te_dispatch_cuda import gemm_grouped

    return gemm_grouped.grouped_gemm([a], [b], layout="NT", **{"out_dtype": torch.float32, **options})


def _shifted(x: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """x at an address that is no multiple of 16 bytes."""
    found = torch.zeros(x.numel() + elements, dtype=x.dtype)[elements:].view(x.shape).copy_(x)
    assert found.data_ptr() % 16
    return found


def test_scales_at_odd_places_are_copied(launched: list[Product]) -> None:
    a = _record(M, row_scale_inv=_shifted(torch.tensor([2.0])))
    b = _record(N, row_scale_inv=_shifted(torch.tensor([3.0]), 3))
    _product(a, b)
    (found,) = launched
    assert found.a_scale % 16 == found.b_scale % 16 == 0 and found.scales == (2.0, 3.0)
    assert (found.a, found.b) == (a.row_data.data_ptr(), b.row_data.data_ptr())  # type: ignore[union-attr]


@pytest.mark.parametrize("which", ["a", "b"])
def test_codes_at_odd_places_are_copied(launched: list[Product], which: str) -> None:
    codes = _shifted(torch.zeros(M if which == "a" else N, K, dtype=torch.uint8))
    a, b = (_record(rows, data=codes if which == name else None) for name, rows in (("a", M), ("b", N)))
    _product(a, b)
    (found,) = launched
    assert found.a % 16 == found.b % 16 == 0
    assert found.problem.a_alignment >= 16 and found.problem.b_alignment >= 16


@pytest.mark.parametrize(("start", "kept"), [(0, True), (16, True), (8, False)])
def test_rows_of_codes_may_lie_apart(launched: list[Product], start: int, kept: bool) -> None:
    codes = torch.zeros(M, K + 16, dtype=torch.uint8)[:, start : start + K]
    _product(_record(M, data=codes), _record(N))
    (found,) = launched
    assert found.a % 16 == 0 and (found.a == codes.data_ptr()) is kept
    assert found.problem.a_stride == (K + 16 if kept else K)


def test_groups_of_one_tensor_start_at_multiples_of_16_bytes(launched: list[Product]) -> None:
    from te_dispatch_cuda import gemm_grouped

    # Rows of 56 bytes: the second group starts at byte 280.
    a, *b = (_record(rows, data=torch.zeros(rows, 56, dtype=torch.uint8)) for rows in (M, N, N, N))
    gemm_grouped.grouped_gemm([a], b, [5, 0, M - 5], layout="NT", out_dtype=torch.float32)
    assert len(launched) == 3 and all(found.a % 16 == 0 for found in launched)


def test_an_output_at_an_odd_place_is_written_through_a_copy(launched: list[Product]) -> None:
    out = _shifted(torch.zeros(M, N))
    (found,) = _product(_record(M), _record(N), out=[out])
    assert launched[0].out % 16 == 0 and found is out and out[0, 0] == 7.0
    good = torch.zeros(M, N)
    _product(_record(M), _record(N), out=[good])
    assert launched[1].out == good.data_ptr()


def test_what_lies_well_is_not_copied(launched: list[Product]) -> None:
    a, b = _record(M), _record(N)
    _product(a, b)
    (found,) = launched
    given: Callable[[Quantized], Any] = lambda x: (x.row_data.data_ptr(), x.row_scale_inv.data_ptr())  # noqa: E731
    assert ((found.a, found.a_scale), (found.b, found.b_scale)) == (given(a), given(b))


def test_plans_know_of_block_scales_at_odd_places(launched: list[Product]) -> None:
    """They are not copied: the plan lays them out anew."""
    blocks = {"scaling": "block_1d", "data": None}
    good, odd = torch.ones(M, 1), _shifted(torch.ones(N, 1))
    _product(_record(M, row_scale_inv=good, **blocks), _record(N, row_scale_inv=odd, **blocks))
    (found,) = launched
    assert (found.a_scale, found.b_scale) == (good.data_ptr(), odd.data_ptr())
    assert (found.problem.a_scales, found.problem.b_scales) == (0, 2)
