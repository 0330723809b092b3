# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Encodings against ml_dtypes: every code decoded, every bfloat16 and millions of float32 patterns encoded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from te_dispatch.numerics.encodings import ENCODINGS, FP8_ENCODINGS, device_encoding, encoding
from te_dispatch_reference.encodings import decode_table, encode, pack_nibbles, unpack_nibbles

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def expected_codes(x: NDArray[np.float32], name: str, common: bool) -> NDArray[np.uint8]:
    """ml_dtypes' cast, with what the cast of te_dispatch does otherwise written as a rule for every input.

    ml_dtypes overflows to NaN or Inf: clamp first. It keeps a NaN's sign: one NaN code. Under common portability -0
    is written as +0.
    """
    form = ENCODINGS[name]
    limit = np.float32(form.common_max if common else form.max)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        codes = np.clip(x, -limit, limit).astype(ML_DTYPES[name]).view(np.uint8)
    if common and form.negative_zero:
        codes = np.where(codes == 0x80, 0x00, codes)
    return np.where(np.isnan(x), form.nan_code, codes).astype(np.uint8)


def check(x: NDArray[np.float32], name: str, common: bool) -> None:
    form = ENCODINGS[name]
    codes = encode(x, form, form.common_max if common else form.max, form.negative_zero and not common)
    expected = expected_codes(x, name, common)
    wrong = np.flatnonzero(codes != expected)
    assert wrong.size == 0, (
        f"{wrong.size} differ, first {x[wrong[0]]!r}: {codes[wrong[0]]:02x} {expected[wrong[0]]:02x}"
    )


@pytest.mark.parametrize("name", FP8_ENCODINGS)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    theirs = np.arange(256, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(decode_table(name), theirs)
    zeros = decode_table(name) == 0
    np.testing.assert_array_equal(np.signbit(decode_table(name)[zeros]), np.signbit(theirs[zeros]))


def test_every_e2m1_code_decodes_as_in_ml_dtypes() -> None:
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(decode_table("e2m1"), theirs)


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_table_of_facts_agrees_with_the_codes(name: str) -> None:
    form, values = ENCODINGS[name], decode_table(name)
    finite = values[np.isfinite(values)]
    assert finite.max() == form.max == values[form.max_code]
    assert finite[finite > 0].min() == form.min_subnormal
    assert np.isinf(values).any() == form.infinity
    assert (form.nan_code is None) == (not np.isnan(values).any())
    assert form.nan_code is None or np.isnan(values[form.nan_code])
    sign = 1 << (form.bits - 1)
    assert (values[sign] == 0 and np.signbit(values[sign])) == form.negative_zero


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", FP8_ENCODINGS)
def test_encoder_on_every_bfloat16(name: str, common: bool) -> None:
    check(np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32), name, common)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", FP8_ENCODINGS)
def test_encoder_on_random_float32_patterns(name: str, common: bool) -> None:
    generator = np.random.default_rng(20261120)
    check(generator.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32), name, common)
    # Uniform patterns hardly ever fall inside the range of an 8-bit format; these do.
    exponent = generator.integers(-20, 18, 500_000)
    mantissa = generator.uniform(-2, 2, 500_000)
    check(np.ldexp(mantissa, exponent).astype(np.float32), name, common)


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", FP8_ENCODINGS)
def test_encoder_at_ties_and_edges(name: str, common: bool) -> None:
    values = decode_table(name)
    positive = np.unique(values[np.isfinite(values) & (values >= 0)])
    ties = (positive[1:] + positive[:-1]) / 2
    step = positive[-1] - positive[-2]
    edges = [ENCODINGS[name].max, ENCODINGS[name].max + step / 2, ENCODINGS[name].max + step, np.inf, np.nan, 0.0]
    tiny = [2.0**-149, 2.0**-126, 2.0**-127, ENCODINGS[name].min_subnormal / 2]
    around = np.concatenate([positive, ties, edges, tiny]).astype(np.float32)
    x = np.concatenate([around, np.nextafter(around, np.float32(0)), np.nextafter(around, np.float32(np.inf))])
    check(np.concatenate([x, -x]), name, common)


def test_e2m1_encoder_against_ml_dtypes() -> None:
    # ml_dtypes' cast saturates too; NaN, which e2m1 lacks, becomes the largest value.
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    form = ENCODINGS["e2m1"]
    clipped = np.where(np.isnan(x), np.float32(6), np.clip(x, -6, 6)).astype(np.float32)
    expected = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(encode(x, form, form.max, True), expected)


def test_nibbles_put_the_even_column_low() -> None:
    codes = np.array([[1, 2, 3], [4, 5, 15]], np.uint8)
    np.testing.assert_array_equal(pack_nibbles(codes), [[0x21, 0x03], [0x54, 0x0F]])
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes), 3), codes)


def test_names() -> None:
    with pytest.raises(ValueError, match=r"encoding: got 'e3m4', expected one of .*e4m3fn"):
        encoding("e3m4")
    assert device_encoding("e4m3", ("e4m3fnuz", "e5m2fnuz")) == "e4m3fnuz"
    assert device_encoding("e5m2", ("e4m3fnuz", "e5m2fnuz")) == "e5m2fnuz"
    assert device_encoding("e4m3", ()) == "e4m3fn"
    assert [ENCODINGS[n].family for n in FP8_ENCODINGS] == ["e4m3", "e4m3", "e5m2", "e5m2"]
    assert [ENCODINGS[n].fnuz for n in FP8_ENCODINGS] == [False, True, False, True]
