# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products whose launches are kept: found again for their own kind of call only, and past no check that they have not
passed.

No GPU and no library: what a product is prepared for is noted instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import caches
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Variants = list[Callable[[], Any]]


def _record(rows: int, columns: int, scaling: str = "tensor", **tags: Any) -> Quantized:
    row, column = torch.zeros(rows, columns, dtype=torch.uint8), torch.zeros(columns, rows, dtype=torch.uint8)
    scale = torch.ones(1)
    scales = (scale, scale) if scaling == "tensor" else (torch.ones(rows, 1), torch.ones(columns, 1))
    if scaling == "mxfp8":
        column, scales = column.t().contiguous(), (scales[0].byte(), scales[1].t().contiguous().byte())
    fields = {"encoding": "e4m3fn", "scale_layout": "canonical", **tags}
    return Quantized(
        row, column, *scales, scaling=scaling, shape=(rows, columns), dtype=BF16, device=row.device, **fields
    )


def _shapes(layout: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout == "TN" else (m, k)), ((n, k) if layout == "NT" else (k, n))


#: m, n, k: each pair of layouts has the same operands in one of them.
SIZES = ((32, 32, 32), (64, 32, 32), (32, 64, 32), (32, 32, 64), (64, 64, 32))
LAYOUTS = ("NT", "NN", "TN")


def _of_records(gemm: Any) -> Variants:
    made: Variants = []
    for layout, sizes, split in itertools.product(LAYOUTS, SIZES, (None, True, False)):
        a, b = (_record(*shape) for shape in _shapes(layout, *sizes))
        made.append(lambda a=a, b=b, o=layout, s=split: gemm.gemm_codes(a, b, layout=o, split_accumulator=s))
    one, two = _record(32, 32), _record(32, 32)
    blocks, more = _record(32, 32, "block_1d"), _record(32, 32, "block_1d")
    laid_out = _record(32, 32, "block_1d", scale_layout="gemm_1d")
    laid_out.row_scale_inv = laid_out.col_scale_inv = torch.ones(1, 32)
    others = (
        (_record(32, 32, encoding="e5m2"), one), (one, _record(32, 32, encoding="e5m2")),
        (_record(32, 32, "mxfp8"), _record(32, 32, "mxfp8")), (more, blocks), (laid_out, blocks), (blocks, laid_out),
    )  # fmt: skip
    for (a, b), layout in itertools.product(others, LAYOUTS):
        made.append(lambda a=a, b=b, o=layout: gemm.gemm_codes(a, b, layout=o))
    options: list[dict[str, Any]] = [{"alpha": x} for x in (2.0, 0.0, -0.0)]
    options += [{"out_dtype": x} for x in (BF16, FP32)]
    options += [{"bias": torch.zeros(33, dtype=x)[i:][:32]} for x in (BF16, FP32) for i in (0, 1)]
    made += [lambda o=o: gemm.gemm_codes(one, two, layout="NT", **o) for o in options]
    return made


def _of_tensors(gemm: Any) -> Variants:
    made: Variants = []
    for dtype, layout, (m, n, k) in itertools.product((BF16, FP16), LAYOUTS, SIZES):
        a, b = (torch.zeros(shape, dtype=dtype) for shape in _shapes(layout, m, n, k))
        for o in ({}, {"alpha": 2.0}, {"alpha": -2.0}, {"out_dtype": FP32}, {"bias": torch.zeros(n)}):
            made.append(lambda a=a, b=b, la=layout, o=o: gemm.gemm(a, b, layout=la, **o))
    return made


def _noted(product: Any) -> Any:
    """What a product was prepared for, and the shapes of its tensors."""
    (a, b, layout, kind, shape, alpha, fresh, accumulate, bias, dtype, multiple), tensors = product
    facts = (a.shape, b.shape, layout, kind, shape, repr(alpha), fresh, accumulate, dtype, multiple)
    low = None if bias is None else (bias.dtype, bias.data_ptr() & 15)
    return facts, low, [x if x is None else (x.shape, x.dtype) for x in tensors]


@pytest.mark.parametrize("variants", [_of_records, _of_tensors], ids=lambda f: f.__name__[1:])
def test_every_product_is_found_for_its_own_kind(products: list[Any], variants: Callable[[Any], Variants]) -> None:
    from te_dispatch_cuda import gemm

    calls = variants(gemm)
    for call in calls * 2:  # prepared, then known
        call()
    products.clear()
    check, checked = gemm.checks.gemm, []

    def noting(*given: Any) -> Any:
        checked.append(given[5])
        return check(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm.checks, "gemm", noting)
        for call in calls:
            call()
    # What is kept is not checked again, unless its bias lies unusually.
    assert all(bias.data_ptr() & 15 for bias in checked) and len(checked) < 3
    known = list(products)
    for call, product in zip(calls, known, strict=True):
        caches.clear("te_dispatch_cuda.gemm.")  # as tuning does
        products.clear()
        call()
        assert products[0][0] is not product[0] and _noted(products[0]) == _noted(product)


@pytest.mark.parametrize("alpha", [0.0, -0.0])
def test_a_product_times_0_is_left_to_others(products: list[Any], alpha: float) -> None:
    """cuBLAS has kernels that leave its bias out."""
    from te_dispatch_cuda import gemm

    x = torch.zeros(32, 64, dtype=BF16)
    for _ in range(3):
        with pytest.raises(Declined, match="times 0"):
            gemm.gemm(x, x, layout="NT", alpha=alpha)
    assert not products


def test_what_is_wrong_is_refused_beside_known_products(products: list[Any]) -> None:
    from te_dispatch_cuda import gemm

    a, b = _record(32, 64), _record(32, 64)
    x, y = torch.zeros(32, 64, dtype=BF16), torch.zeros(32, 64, dtype=BF16)
    for _ in range(3):
        gemm.gemm_codes(a, b, layout="NT")
        gemm.gemm(x, y, layout="NT")
    products.clear()
    wrong: list[dict[str, Any]] = [
        {"layout": "NN"}, {"layout": "XX"}, {"alpha": "1"}, {"accumulate": True}, {"bias": torch.zeros(31)},
        {"out_dtype": torch.int32}, {"aux": x},
    ]  # fmt: skip
    for options in wrong:
        for operator, pair in ((gemm.gemm_codes, (a, b)), (gemm.gemm, (x, y))):
            with pytest.raises((ValueError, TypeError)):
                operator(*pair, **{"layout": "NT", **options})
    b.col_data = b.col_data.int()  # not read, and wrong all the same
    with pytest.raises(ValueError, match="col_data"):
        gemm.gemm_codes(a, b, layout="NT")
    b.row_data = b.row_data[:31]
    for pair in ((a, x), (x, b), (a, None), (a, b)):
        with pytest.raises((ValueError, TypeError)):
            gemm.gemm_codes(*pair, layout="NT")
    assert products == []


def test_tensors_with_gaps_are_copied_every_time(products: list[Any]) -> None:
    from te_dispatch_cuda import gemm

    dense, gaps = torch.zeros(32, 64, dtype=BF16), torch.zeros(32, 128, dtype=BF16)[:, ::2]
    for _ in range(4):
        gemm.gemm(dense, dense, layout="NT")
        gemm.gemm(gaps, dense, layout="NT")
        gemm.gemm(dense, dense, layout="NT", bias=torch.zeros(64, dtype=BF16)[::2])
    assert all(x is None or x.is_contiguous() for _, tensors in products for x in tensors)


def test_fp32_is_asked_for_its_precision(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch_cuda import gemm

    x = torch.zeros(32, 32)
    for allowed in (False, True, False, True, True, False):
        monkeypatch.setattr(gemm, "allows_tf32", lambda allowed=allowed: allowed)
        products.clear()
        gemm.gemm(x, x, layout="NT")
        assert products[0][0][3] == (FP32, allowed)
