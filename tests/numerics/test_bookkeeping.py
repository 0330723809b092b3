# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scale updates, conversion between OCP and FNUZ, scale layouts, partial casts, padding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, MXFP8Quantizer, NVFP4Quantizer
from te_dispatch_reference.encodings import decode_table
from te_dispatch_reference.quantize import (
    compute_amax,
    convert_encoding,
    dequantize,
    pad_rows,
    partial_amax,
    partial_cast,
    quantize,
    relayout_scales,
    transpose_quantized,
    unpad_rows,
    update_delayed_scales,
)

LARGEST = float(np.finfo(np.float32).max)
fast = settings(max_examples=200, deadline=None)
ENTRIES = st.one_of(
    st.sampled_from([0.0, -0.0, math.inf, math.nan, 1e-44, LARGEST]), st.floats(0, 1e6, width=32, allow_nan=False)
)


def scalar_update(
    column: list[float], scale: float, limit: float, algorithm: str, margin: int
) -> tuple[list[float], float]:
    """One tensor's history and scale after a step, in Python floats rounded to float32 where the contract rounds."""
    if column[0] == 0:
        return column, scale
    numbers = [v for v in column if not math.isnan(v)]
    amax = column[0] if algorithm == "most_recent" else max(numbers, default=math.nan)
    if amax > 0 and not math.isinf(amax):
        numerator = float(np.float32(limit * 2.0**-margin))
        # A float64 quotient of float32 numbers, rounded to float32, is the float32 quotient (53 >= 2 * 24 + 2).
        quotient = numerator / amax
        scale = float(np.float32(quotient)) if quotient < LARGEST else LARGEST
    return [0.0, *column[2:], column[0]] if len(column) > 1 else [0.0], scale


@fast
@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(ENTRIES, min_size=n, max_size=n), min_size=1, max_size=5)),
    st.sampled_from(["max", "most_recent"]),
    st.integers(0, 3),
)
def test_update_against_scalars(columns: list[list[float]], algorithm: str, margin: int) -> None:
    limits = [(448.0, 57344.0, 240.0)[i % 3] for i in range(len(columns))]
    history = torch.tensor(columns, dtype=torch.float32).T.contiguous()
    scale = torch.arange(1, len(columns) + 1, dtype=torch.float32)
    expected = [
        scalar_update(history[:, i].tolist(), scale[i].item(), limits[i], algorithm, margin)
        for i in range(len(columns))
    ]
    update_delayed_scales([history], [scale], [limits], algorithm=algorithm, margin=margin)
    np.testing.assert_array_equal(history.T.numpy(), np.array([c for c, _ in expected], np.float32))
    np.testing.assert_array_equal(scale.numpy(), np.array([s for _, s in expected], np.float32))


def test_update_names_bad_arguments() -> None:
    good = ([torch.zeros(4, 2)], [torch.ones(2)], [[448.0, 448.0]])
    with pytest.raises(ValueError, match="algorithm: got 'mean'"):
        update_delayed_scales(*good, algorithm="mean")
    with pytest.raises(ValueError, match="histories: got none"):
        update_delayed_scales([], [], [])
    with pytest.raises(ValueError, match="scales: got 0"):
        update_delayed_scales(good[0], [], good[2])
    with pytest.raises(ValueError, match="max_values: got 0"):
        update_delayed_scales(good[0], good[1], [])
    with pytest.raises(ValueError, match=r"histories\[0\]: got torch.float64"):
        update_delayed_scales([good[0][0].double()], good[1], good[2])
    with pytest.raises(ValueError, match=r"scales\[0\]: got torch.float32 \(3,\)"):
        update_delayed_scales(good[0], [torch.ones(3)], good[2])
    with pytest.raises(ValueError, match=r"max_values\[0\]: got 1 numbers"):
        update_delayed_scales(good[0], good[1], [[448.0]])


def every_code(name: str, scale_inv: float = 0.375) -> Quantized:
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    scale = torch.tensor([scale_inv])
    return Quantized(
        codes, codes.T.contiguous(), scale, scale, name, "tensor", "canonical", (2, 128), torch.float32, codes.device
    )


PAIRS = [("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")]


@pytest.mark.parametrize(("ocp", "fnuz"), PAIRS)
def test_ocp_to_fnuz_keeps_every_value(ocp: str, fnuz: str) -> None:
    source = every_code(ocp)
    count = torch.zeros(1, dtype=torch.int64)
    made = convert_encoding(source, encoding=fnuz, overflow="error", count=count)
    assert made.encoding == fnuz and count.item() == 0
    before, after = dequantize(source).numpy(), dequantize(made).numpy()
    finite = np.isfinite(before)
    np.testing.assert_array_equal(after[finite], before[finite])
    assert np.isnan(after[~finite]).all() and not np.signbit(after[after == 0]).any()
    np.testing.assert_array_equal(made.col_data, made.row_data.T)
    assert made.col_scale_inv is made.row_scale_inv and made.row_scale_inv is not source.row_scale_inv


@pytest.mark.parametrize(("ocp", "fnuz"), PAIRS)
def test_fnuz_to_ocp_saturates_counts_or_raises(ocp: str, fnuz: str) -> None:
    source = every_code(fnuz)
    count = torch.tensor([10])
    made = convert_encoding(source, encoding=ocp, count=count)
    before = dequantize(source).numpy().astype(np.float64)
    after = dequantize(made).numpy().astype(np.float64)
    limit = ENCODINGS[fnuz].common_max * 0.375
    beyond = np.abs(before) > limit
    assert count.item() == 10 + beyond.sum() and beyond.sum() == (2 if ocp == "e4m3fn" else 8)
    np.testing.assert_array_equal(after, np.clip(before, -limit, limit))  # NaN stays NaN
    untouched = torch.tensor([10])
    with pytest.raises(ValueError, match="overflow: "):
        convert_encoding(source, encoding=ocp, overflow="error", count=untouched)
    assert untouched.item() == 10
    back = convert_encoding(made, encoding=fnuz)
    np.testing.assert_array_equal(dequantize(back).numpy(), after)


def test_convert_names_bad_arguments() -> None:
    with pytest.raises(ValueError, match="encoding: got e5m2, expected the other form of e4m3fn"):
        convert_encoding(every_code("e4m3fn"), encoding="e5m2")
    with pytest.raises(ValueError, match="encoding: got e4m3fn,"):
        convert_encoding(every_code("e4m3fn"), encoding="e4m3fn")
    with pytest.raises(ValueError, match="overflow: got 'wrap'"):
        convert_encoding(every_code("e4m3fn"), encoding="e4m3fnuz", overflow="wrap")
    with pytest.raises(ValueError, match="x: got mxfp8 scaling"):
        convert_encoding(quantize(torch.ones(2, 32), MXFP8Quantizer(), usage="row"), encoding="e4m3fnuz")


@pytest.mark.parametrize(
    ("quantizer", "layout"),
    [
        (BlockQuantizer(), "gemm_1d"),
        (BlockQuantizer(two_d=True), "gemm_2d"),
        (MXFP8Quantizer(), "swizzled_32x4x4"),
        (NVFP4Quantizer(), "swizzled_32x4x4"),
    ],
    ids=lambda p: p if isinstance(p, str) else p.scaling,
)
def test_scale_layouts_round_trip_and_read_the_same(quantizer: BlockQuantizer, layout: str) -> None:
    x = torch.randn(150, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 150)[:, None]
    made = quantize(x, quantizer, usage="both")
    moved = relayout_scales(made, scale_layout=layout)
    assert moved.row_data is made.row_data and moved.scale_layout == layout
    np.testing.assert_array_equal(dequantize(moved), dequantize(made))
    back = relayout_scales(moved, scale_layout="canonical")
    np.testing.assert_array_equal(back.row_scale_inv, made.row_scale_inv)
    np.testing.assert_array_equal(back.col_scale_inv, made.col_scale_inv)


@pytest.mark.parametrize("two_d", [False, True])
def test_a_cast_into_a_scale_layout_is_a_cast_and_a_relayout(two_d: bool) -> None:
    layout = "gemm_2d" if two_d else "gemm_1d"
    x = torch.randn(150, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 150)[:, None]
    quantizer = BlockQuantizer(two_d=two_d, scale_layout=layout)
    made = quantize(x, quantizer, usage="both")
    canonical = quantize(x, BlockQuantizer(two_d=two_d), usage="both")
    expected = relayout_scales(canonical, scale_layout=layout)
    assert made.scale_layout == layout
    for name in ("row_data", "col_data", "row_scale_inv", "col_scale_inv"):
        np.testing.assert_array_equal(getattr(made, name), getattr(expected, name))
    with pytest.raises(ValueError, match=f"^out: .*with canonical scales, expected .*with {layout} scales"):
        quantize(x, quantizer, usage="both", out=canonical)
    assert quantize(x * 2, quantizer, usage="both", out=made) is made


def test_a_quantizer_refuses_a_scale_layout_of_another_scaling() -> None:
    for two_d, layout in ((False, "gemm_2d"), (True, "gemm_1d"), (False, "swizzled_32x4x4"), (True, "")):
        with pytest.raises(ValueError, match=f"^scale_layout: got '{layout}' with block_"):
            BlockQuantizer(two_d=two_d, scale_layout=layout)


def test_swizzle_follows_its_formula() -> None:
    made = quantize(torch.randn(130, 32 * 5).exp(), MXFP8Quantizer(), usage="both")
    moved = relayout_scales(made, scale_layout="swizzled_32x4x4")
    # The column-wise scales are contracted along M, so (K, blocks of M) is what the tiles hold.
    for canonical, flat in ((made.row_scale_inv, moved.row_scale_inv), (made.col_scale_inv.T, moved.col_scale_inv)):
        rows, columns = canonical.shape
        assert flat.shape == (math.ceil(rows / 128) * 128, math.ceil(columns / 4) * 4)
        memory, tiles = flat.reshape(-1), flat.shape[1] // 4
        left = memory.clone()
        for r in range(rows):
            for c in range(columns):
                tile = (r // 128) * tiles + c // 4
                at = tile * 512 + ((r % 128 % 32) * 4 + r % 128 // 32) * 4 + c % 4
                assert memory[at] == canonical[r, c]
                left[at] = 0
        assert not left.any(), "padding must be zero"


def test_relayout_names_bad_layouts() -> None:
    made = quantize(torch.ones(4, 32), MXFP8Quantizer(), usage="row")
    with pytest.raises(ValueError, match="scale_layout: got 'tiled'"):
        relayout_scales(made, scale_layout="tiled")
    with pytest.raises(ValueError, match=r"scale_layout: got 'gemm_1d', which is for block_1d, with mxfp8"):
        relayout_scales(made, scale_layout="gemm_1d")


def test_transpose_moves_bytes() -> None:
    x = torch.randn(5, 140, 130)
    for quantizer in (CurrentQuantizer(), BlockQuantizer(two_d=True)):
        both = quantize(x, quantizer, usage="both")
        made = transpose_quantized(quantize(x, quantizer, usage="row"))
        np.testing.assert_array_equal(made.col_data, both.col_data)
        np.testing.assert_array_equal(made.col_scale_inv, both.col_scale_inv)
    for refused in (BlockQuantizer(), MXFP8Quantizer(), NVFP4Quantizer()):
        with pytest.raises(ValueError, match=f"x: got {refused.scaling} scaling"):
            transpose_quantized(quantize(x, refused, usage="row"))
    with pytest.raises(ValueError, match="x: has no row-wise copy"):
        transpose_quantized(quantize(x, CurrentQuantizer(), usage="column"))


@pytest.mark.parametrize("block", [0, 128])
def test_shards_add_up_to_the_whole_cast(block: int) -> None:
    x = torch.randn(200, 300)
    flat = x.reshape(-1)
    blocks = (2, 3) if block else (1, 1)
    amax = torch.zeros(blocks)
    out = torch.zeros(flat.numel(), dtype=torch.uint8)
    cuts = [0, 1, 777, 40_000, flat.numel(), flat.numel()]
    for start, end in itertools.pairwise(cuts):
        assert partial_amax(flat[start:end], amax, height=200, width=300, start=start, block=block) is amax
    quantizer = BlockQuantizer(two_d=True, power_of_two=False) if block else CurrentQuantizer()
    whole = quantize(x, quantizer, usage="row")
    scale = torch.tensor(448.0) / amax
    np.testing.assert_array_equal((1 / scale).reshape(whole.row_scale_inv.shape), whole.row_scale_inv)
    for start, end in itertools.pairwise(cuts):
        partial_cast(
            flat[start:end], out[start:end], scale, height=200, width=300, start=start, block=block, encoding="e4m3fn"
        )
    np.testing.assert_array_equal(out.reshape(200, 300), whole.row_data)


def test_partial_casts_name_bad_arguments() -> None:
    x, amax, out = torch.ones(10), torch.zeros(1, 1), torch.zeros(10, dtype=torch.uint8)
    size = {"height": 3, "width": 4, "start": 0}
    with pytest.raises(ValueError, match="start: got 5"):
        partial_amax(x, amax, height=3, width=4, start=5, block=0)
    with pytest.raises(ValueError, match="block: got 64"):
        partial_amax(x, amax, **size, block=64)
    with pytest.raises(ValueError, match=r"amax: got shape \(1, 1\), expected \(1, 2\)"):
        partial_amax(x, amax, height=3, width=200, start=0, block=128)
    with pytest.raises(ValueError, match="x: got shape"):
        partial_amax(x.reshape(2, 5), amax, **size, block=0)
    with pytest.raises(ValueError, match=r"out: got torch\.float32"):
        partial_cast(x, x.clone(), amax, **size, block=0, encoding="e4m3fn")
    with pytest.raises(ValueError, match="encoding: got 'e2m1'"):
        partial_cast(x, out, amax, **size, block=0, encoding="e2m1")
    with pytest.raises(ValueError, match=r"encoding: got .* expected one of"):
        partial_cast(x, out, amax, **size, block=0, encoding="e9m9")


def test_amax() -> None:
    out = torch.tensor([99.0])
    assert compute_amax(torch.tensor([[1.0, -3.0, math.nan]]), out=out) is out and out.item() == 3.0
    assert compute_amax(torch.tensor([-math.inf, math.nan])).item() == math.inf
    assert compute_amax(torch.full((2,), math.nan)).item() == 0.0
    assert compute_amax(torch.zeros(0, 4)).shape == (1,)
    with pytest.raises(ValueError, match=r"out: got torch\.float32"):
        compute_amax(torch.ones(3), out=torch.zeros(2))
    with pytest.raises(ValueError, match=r"x: got dtype torch\.int64"):
        compute_amax(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_padding_moves_bytes(dtype: torch.dtype) -> None:
    x = torch.arange(7 * 3, dtype=torch.uint8).reshape(7, 3).to(dtype)
    padded = pad_rows(x, [3, 0, 4], [4, 2, 4])
    assert padded.shape == (10, 3) and padded.dtype == dtype
    rows = [0, 1, 2, 6, 7, 8, 9]
    assert torch.equal(padded.view(torch.uint8)[rows], x.view(torch.uint8))
    assert not padded.view(torch.uint8)[[3, 4, 5]].any()
    assert torch.equal(unpad_rows(padded, [3, 0, 4], [4, 2, 4]).view(torch.uint8), x.view(torch.uint8))


def test_padding_names_bad_arguments() -> None:
    x = torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"x: got shape \(4, 2\), expected \(5, K\)"):
        pad_rows(x, [5], [8])
    with pytest.raises(ValueError, match="padded_splits: got 2 parts"):
        pad_rows(x, [4], [4, 4])
    with pytest.raises(ValueError, match=r"padded_splits: got \[3\]"):
        pad_rows(x, [4], [3])
    with pytest.raises(ValueError, match=r"x: got shape \(4, 2\), expected \(8, K\)"):
        unpad_rows(x, [4], [8])


def test_decode_tables_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        decode_table("e4m3fn")[0] = 1.0


def test_update_delayed_scales_reports_the_amax_behind_every_scale_that_changes() -> None:
    # columns: a plain one, one without a cast, one that saw Inf, one that saw NaN only
    history = torch.tensor([[2.0, 0.0, math.inf, math.nan], [8.0, 4.0, 1.0, 0.0]])
    scale, amaxes = torch.full((4,), 3.0), torch.full((4,), -1.0)
    update_delayed_scales([history], [scale], [[448.0] * 4], amaxes=[amaxes])
    assert amaxes.tolist() == [8.0, -1.0, -1.0, -1.0]
    assert scale.tolist() == [448.0 / 8.0, 3.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="amaxes"):
        update_delayed_scales([history], [scale], [[448.0] * 4], amaxes=[torch.zeros(3)])
