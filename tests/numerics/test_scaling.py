# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The casts' scales: each kind of quantizer against a scalar or ml_dtypes rendering of its docstring."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch_reference.encodings import unpack_nibbles
from te_dispatch_reference.quantize import dequantize, quantize

F32 = NDArray[np.float32]
LARGEST = np.finfo(np.float32).max

MATRICES = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    fill=st.floats(-4, 4, width=32),
)
ORDINARY = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
    elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
    fill=st.floats(-4, 4, width=32),
)
fast = settings(max_examples=60, deadline=None)


def row(x: F32, quantizer: Quantizer) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    made = quantize(torch.from_numpy(x), quantizer, usage="row")
    assert made.row_data is not None and made.row_scale_inv is not None and made.col_data is None
    return made.row_data.numpy(), made.row_scale_inv.numpy()


def amax_of(values: F32) -> np.float32:
    return np.float32(max((abs(v) for v in values.ravel().tolist() if not math.isnan(v)), default=0.0))


def scalar_scale(amax: np.float32, limit: float, epsilon: float, power_of_two: bool) -> np.float32:
    amax = max(amax, np.float32(epsilon))
    if amax == 0 or math.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(limit) / amax, LARGEST)
    return np.float32(2.0 ** math.floor(math.log2(scale))) if power_of_two else scale


def ml_codes(scaled: F32, limit: float) -> NDArray[np.uint8]:
    codes = np.clip(scaled, -limit, limit).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(scaled), 0x7F, codes).astype(np.uint8)


def product(x: F32, scale: np.float32) -> F32:
    with np.errstate(all="ignore"):
        return x * scale


@fast
@given(MATRICES, st.booleans(), st.sampled_from([0.0, 2.0**-10]))
def test_current(x: F32, power_of_two: bool, epsilon: float) -> None:
    codes, scale_inv = row(x, CurrentQuantizer(power_of_two=power_of_two, epsilon=epsilon))
    scale = scalar_scale(amax_of(x), 448.0, epsilon, power_of_two)
    np.testing.assert_array_equal(scale_inv, [np.float32(1) / scale])
    np.testing.assert_array_equal(codes, ml_codes(product(x, scale), 448.0))


@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFFA00000], ids=hex)
def test_no_nan_quiet_or_signalling_hides_an_amax(nan: int) -> None:
    x = np.full((4, 128), 0.25, np.float32)
    x[0, 0], x[3, 127] = 3.0, 2.0
    x.view(np.uint32)[1:3, ::2] = nan
    assert row(x, CurrentQuantizer())[1] == np.float32(1) / (np.float32(448) / np.float32(3))
    scales = np.array([[3.0], [0.25], [0.25], [2.0]], np.float32)
    np.testing.assert_array_equal(row(x, BlockQuantizer(power_of_two=False))[1], 1 / (np.float32(448) / scales))
    np.testing.assert_array_equal(row(x, MXFP8Quantizer())[1], row(np.nan_to_num(x, nan=0.0), MXFP8Quantizer())[1])


@pytest.mark.parametrize(
    ("amax", "expected"), [(0.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (2.0, 224.0), (1e-44, LARGEST)]
)
def test_current_with_a_given_amax(amax: float, expected: float) -> None:
    made = quantize(torch.ones(3, 4), CurrentQuantizer(), usage="row", amax=torch.tensor([amax]))
    assert made.row_scale_inv is not None
    assert made.row_scale_inv.item() == np.float32(1) / np.float32(expected)


def test_delayed_uses_its_scale_and_accumulates_amax() -> None:
    amax = torch.tensor([5.0])
    quantizer = DelayedQuantizer("e4m3fn", scale=torch.tensor([3.0]), amax=amax)
    x = torch.tensor([[1.0, -7.0, math.nan], [200.0, -0.0, 0.1]])
    made = quantize(x, quantizer, usage="both")
    assert amax.item() == 200.0
    np.testing.assert_array_equal(made.row_data, ml_codes(x.numpy() * np.float32(3), 448.0))
    np.testing.assert_array_equal(made.col_data, made.row_data.T)
    assert made.row_scale_inv.item() == np.float32(1) / np.float32(3) and made.col_scale_inv is made.row_scale_inv
    quantize(torch.full((2, 2), math.nan), quantizer, usage="row")
    assert amax.item() == 200.0
    quantize(torch.tensor([[-math.inf]]), quantizer, usage="row")
    assert amax.item() == math.inf
    quantizer.scale.fill_(9.0)
    assert made.row_scale_inv.item() == np.float32(1) / np.float32(3), "scale_inv must not alias the state"


def test_bfloat16_is_multiplied_in_float32() -> None:
    x = torch.arange(1, 2000).to(torch.bfloat16).reshape(1, -1) / 512
    scale = torch.tensor([1.2345678])
    codes = quantize(x, DelayedQuantizer(scale=scale), usage="row").row_data
    wrong = (x * scale.to(torch.bfloat16)).float().numpy()
    np.testing.assert_array_equal(codes, ml_codes(x.float().numpy() * scale.numpy(), 448.0))
    assert (codes.numpy() != ml_codes(wrong, 448.0)).any(), "the inputs do not tell the two products apart"


@fast
@given(ORDINARY)
def test_common_codes_are_equal_between_ocp_and_fnuz(x: F32) -> None:
    # Below, max_value / amax passes float32's end and the one scale cannot stay twice the other.
    x = np.where(np.abs(x) < 2.0**-100, np.float32(0), x)
    amax = amax_of(x)
    for ocp, fnuz in (("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")):
        for kind in (CurrentQuantizer, BlockQuantizer):
            left, left_scale = row(x, kind(ocp, common=True))
            right, right_scale = row(x, kind(fnuz, common=True))
            np.testing.assert_array_equal(left, right)
            used = np.broadcast_to(amax > 0, left_scale.shape)
            blockwise = left_scale != 1.0  # a block of zeros has scale 1 on both
            np.testing.assert_array_equal(right_scale[used & blockwise], 2 * left_scale[used & blockwise])


@fast
@given(MATRICES, st.booleans())
def test_blocks(x: F32, power_of_two: bool) -> None:
    x = np.tile(x, (4, 8))[:150, :290]  # several blocks, the last ones partial
    codes, scale_inv = row(x, BlockQuantizer(power_of_two=power_of_two))
    codes_2d, scale_inv_2d = row(x, BlockQuantizer(two_d=True, power_of_two=power_of_two))
    for j in range(0, x.shape[1], 128):
        for i in range(x.shape[0]):
            block = x[i : i + 1, j : j + 128]
            scale = scalar_scale(amax_of(block), 448.0, 0.0, power_of_two)
            assert scale_inv[i, j // 128] == np.float32(1) / scale
            np.testing.assert_array_equal(codes[i : i + 1, j : j + 128], ml_codes(product(block, scale), 448.0))
        for i in range(0, x.shape[0], 128):
            tile = x[i : i + 128, j : j + 128]
            scale = scalar_scale(amax_of(tile), 448.0, 0.0, power_of_two)
            assert scale_inv_2d[i // 128, j // 128] == np.float32(1) / scale
            np.testing.assert_array_equal(codes_2d[i : i + 128, j : j + 128], ml_codes(product(tile, scale), 448.0))


@fast
@given(MATRICES)
def test_mxfp8(x: F32) -> None:
    codes, exponents = row(x, MXFP8Quantizer())
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 32):
            block = x[i, j : j + 32]
            amax = amax_of(block)
            ratio = np.float32(amax) / np.float32(448)
            if math.isinf(amax):
                expected = 0xFE
            elif ratio == 0:
                expected = 0
            else:
                # The smallest power of two that is not below the ratio, by search rather than by logarithm.
                expected = next(e for e in range(255) if math.ldexp(1.0, e - 127) >= float(ratio))
            assert exponents[i, j // 32] == expected
            scaled = product(block, np.float32(math.ldexp(1.0, 127 - expected)))
            np.testing.assert_array_equal(codes[i, j : j + 32], ml_codes(scaled, 448.0))


@fast
@given(ORDINARY, st.booleans())
def test_nvfp4(x: F32, two_d: bool) -> None:
    made = quantize(torch.from_numpy(x), NVFP4Quantizer(two_d=two_d), usage="row")
    codes = unpack_nibbles(made.row_data.numpy(), x.shape[1])
    total = scalar_scale(amax_of(x), 448.0 * 6.0, 0.0, False)
    assert made.global_scale_inv.item() == np.float32(1) / total
    step = 16 if two_d else 1
    for i in range(0, x.shape[0], step):
        for j in range(0, x.shape[1], 16):
            block = x[i : i + step, j : j + 16]
            fraction = product(amax_of(block), total) / np.float32(6)
            code = ml_codes(np.array([fraction]), 448.0)[0]
            assert (made.row_scale_inv[i : i + step, j // 16].numpy() == code).all()
            divisor = np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0]
            expected = np.zeros(block.shape, np.uint8)
            if divisor != 0:
                quotient = np.clip(product(block, total) / divisor, -6, 6)
                expected = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            np.testing.assert_array_equal(codes[i : i + step, j : j + 16], expected)


QUANTIZERS = [
    CurrentQuantizer(),
    CurrentQuantizer("e5m2fnuz", common=True),
    BlockQuantizer(),
    BlockQuantizer(two_d=True),
    MXFP8Quantizer("e5m2"),
    NVFP4Quantizer(),
]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.scaling}-{q.encoding}")
@fast
@given(x=ORDINARY)
def test_the_column_copy_is_the_row_copy_of_the_transpose(quantizer: Quantizer, x: F32) -> None:
    both = quantize(torch.from_numpy(x), quantizer, usage="both")
    turned = quantize(torch.from_numpy(x.T.copy()), quantizer, usage="row")
    flip = (lambda t: t.T) if quantizer.scaling == "mxfp8" else (lambda t: t)
    np.testing.assert_array_equal(flip(both.col_data), turned.row_data)
    np.testing.assert_array_equal(flip(both.col_scale_inv), turned.row_scale_inv)
    only = quantize(torch.from_numpy(x), quantizer, usage="column")
    assert only.row_data is None and only.row_scale_inv is None
    np.testing.assert_array_equal(only.col_data, both.col_data)


@pytest.mark.parametrize(
    ("quantizer", "relative", "absolute"),
    [
        # Half a unit in the last place: 2^-4 for e4m3, 2^-3 for e5m2; below the normals half the smallest step.
        (CurrentQuantizer(), 2.0**-4, 2.0**-10),
        (CurrentQuantizer("e5m2"), 2.0**-3, 2.0**-17),
        (BlockQuantizer(), 2.0**-4, 2.0**-10),
        (BlockQuantizer(two_d=True), 2.0**-4, 2.0**-10),
        (MXFP8Quantizer(), 2.0**-4, 2.0**-10),
    ],
    ids=lambda p: f"{p.scaling}-{p.encoding}" if hasattr(p, "scaling") else "",
)
@fast
@given(x=ORDINARY)
def test_a_round_trip_errs_by_half_a_step(quantizer: Quantizer, relative: float, absolute: float, x: F32) -> None:
    x = np.where(np.abs(x) < 2.0**-60, np.float32(0), x)  # keeps scales away from the ends of float32's range
    made = quantize(torch.from_numpy(x), quantizer, usage="row")
    back = dequantize(made, dtype=torch.float32).numpy().astype(np.float64)
    # Of a block's scale_inv only the largest is needed for a bound.
    scale_inv = made.row_scale_inv.numpy()
    widest = float(np.exp2(scale_inv.astype(np.float64) - 127).max() if made.scaling == "mxfp8" else scale_inv.max())
    bound = np.maximum(relative * np.abs(x.astype(np.float64)), absolute * widest)
    # Three float32 roundings (scale, product, product) add 2^-24 each.
    assert (np.abs(back - x) <= bound + 3 * 2.0**-24 * np.abs(x.astype(np.float64))).all()
