# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Each rule accepts exactly what it says, NaN, Inf and zeros of both signs included; codes read as ml_dtypes reads."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.conformance.decoding import decode, nibbles, table
from te_dispatch.conformance.rules import HISTOGRAM, Bitwise, Codes, Open, Sampled, Within, judge
from te_dispatch.numerics.encodings import FP8_ENCODINGS

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
NAN, INF = math.nan, math.inf
_ANY = st.floats(width=32)


def _f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("name", FP8_ENCODINGS)
def test_every_code_reads_as_ml_dtypes_reads_it(name: str) -> None:
    theirs = np.arange(256, dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(table(name).numpy(), theirs)
    np.testing.assert_array_equal(np.signbit(table(name).numpy())[theirs == 0], np.signbit(theirs)[theirs == 0])


def test_every_code_of_four_bits_reads_as_ml_dtypes_reads_it() -> None:
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(table("e2m1").numpy(), np.tile(theirs, 16))
    packed = torch.tensor([[0x21, 0xF3]], dtype=torch.uint8)
    assert nibbles(packed).tolist() == [[1, 2, 3, 15]]


@settings(deadline=None)
@given(st.lists(st.tuples(_ANY, _ANY, st.floats(0, 2.0**100, width=32)), min_size=1, max_size=8))
def test_within_accepts_errors_up_to_the_limit(rows: list[tuple[float, float, float]]) -> None:
    actual, expected, limit = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows))
    overflow = (2 - 2.0**-24) * 2.0**127
    right = []
    for got, want, most in zip(actual.tolist(), expected.tolist(), limit.tolist(), strict=True):
        if math.isnan(want) or math.isnan(got):
            right.append(math.isnan(want) and math.isnan(got))
        elif math.isinf(want):
            right.append(got == want)
        elif math.isinf(got):  # rounding may overflow where the bound reaches past the largest number
            right.append(want + most >= overflow if got > 0 else want - most <= -overflow)
        else:
            right.append(abs(got - want) <= most)
    found = judge("x", Within(limit.double()), actual, expected)
    assert found.bad == right.count(False) and found.passed == all(right) and found.total == len(rows)
    if not all(right):
        assert not right[found.index[0]], "the worst element is none of the wrong ones"


@pytest.mark.parametrize("got, want, passes", (
    (NAN, NAN, True), (NAN, 1.0, False), (1.0, NAN, False), (INF, INF, True), (-INF, INF, False), (INF, 1.0, False),
    (3e38, INF, False), (INF, NAN, False), (NAN, INF, False), (-0.0, 0.0, True), (1.0, 1.0, True),
))  # fmt: skip
@pytest.mark.parametrize("limit", (0.0, 1e-3))
def test_special_values_within_a_bound(got: float, want: float, limit: float, passes: bool) -> None:
    assert judge("x", Within(torch.tensor(limit)), _f32(got), _f32(want)).passed is passes


@pytest.mark.parametrize("got, want, limit, passes", (
    (INF, -2344540.5, 4e9, True), (-INF, -2344540.5, 4e9, True), (INF, 0.0, 7e4, True), (-INF, 0.0, 7e4, True),
    (INF, -2344540.5, 2.4e6, False), (-INF, -2344540.5, 1.0, True), (INF, 0.0, 65519.0, False),
    (INF, 65504.0, 0.0, False), (INF, 65504.0, 15.9, False), (INF, 65504.0, 16.0, True), (-INF, 65504.0, 16.0, False),
    (NAN, 0.0, 7e4, False), (INF, -INF, 7e4, False), (INF, NAN, 7e4, False),
))  # fmt: skip
def test_an_infinity_of_a_sign_that_the_bound_reaches(got: float, want: float, limit: float, passes: bool) -> None:
    actual = torch.tensor([got], dtype=torch.float16)
    assert judge("x", Within(torch.tensor(limit, dtype=torch.float64)), actual, _f32(want)).passed is passes


@pytest.mark.parametrize("dtype, overflow", (
    (torch.float16, 65520.0), (torch.bfloat16, (2 - 2.0**-8) * 2.0**127), (torch.float32, (2 - 2.0**-24) * 2.0**127),
))  # fmt: skip
def test_where_rounding_overflows(dtype: torch.dtype, overflow: float) -> None:
    for want, passes in ((overflow, True), (math.nextafter(overflow, 0.0), False)):
        actual, expected = torch.tensor([INF], dtype=dtype), torch.tensor([want], dtype=torch.float64)
        assert judge("x", Within(torch.tensor(0.0)), actual, expected).passed is passes


def test_a_limit_of_zero_asks_for_the_number_itself() -> None:
    limit = Within(torch.tensor(0.0))
    assert judge("x", limit, _f32(1.0), _f32(1.0)).passed
    assert judge("x", limit, _f32(1.0 + 2**-23), _f32(1.0)).ratio == INF


def test_an_infinite_limit_leaves_the_value_open() -> None:
    assert judge("x", Within(torch.tensor(INF)), _f32(5.0, NAN, -INF), _f32(1.0, 2.0, 3.0)).passed


def test_a_limit_that_is_nan_accepts_nothing() -> None:
    assert not judge("x", Within(torch.tensor(NAN)), _f32(1.5), _f32(1.0)).passed


@pytest.mark.parametrize("only, passes", ((None, False), ([True, False], True), ([False, True], False)))
def test_only_some_elements_may_be_ruled(only: list[bool] | None, passes: bool) -> None:
    where = None if only is None else torch.tensor(only)
    actual, expected = _f32(1.0, 9.0), _f32(1.0, 2.0)
    for rule in (Within(torch.tensor(0.5), where), Bitwise(where)):
        found = judge("x", rule, actual, expected)
        assert found.passed is passes and found.total == (2 if only is None else 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=8), st.booleans())
def test_bitwise_is_equal_bits_but_for_the_payload_of_a_nan(pairs: list[tuple[int, int]], moved: bool) -> None:
    actual, expected = (torch.tensor(bits, dtype=torch.int64).to(torch.int32) for bits in zip(*pairs))
    floats = actual.view(torch.float32), expected.view(torch.float32)
    right = [
        one == other or (not moved and math.isnan(a) and math.isnan(b))
        for (one, other), a, b in zip(pairs, floats[0].tolist(), floats[1].tolist(), strict=True)
    ]
    assert judge("x", Bitwise(moved=moved), *floats).bad == right.count(False)
    assert judge("x", Bitwise(moved=moved), actual, expected).bad == sum(one != other for one, other in pairs)


def test_zeros_of_both_signs_differ_by_bits() -> None:
    assert not judge("x", Bitwise(), _f32(-0.0), _f32(0.0)).passed
    assert not judge("x", Bitwise(), _f32(1.0), _f32(1.0).bfloat16()).passed


@settings(deadline=None)
@given(st.sampled_from(FP8_ENCODINGS), st.integers(0, 255), st.integers(0, 255), st.integers(0, 255))
def test_codes_lie_between_those_of_the_interval_s_ends(name: str, low: int, high: int, code: int) -> None:
    values = table(name)
    rule = Codes(name, *(torch.tensor([c], dtype=torch.uint8) for c in (low, high)))
    actual = torch.tensor([code], dtype=torch.uint8)
    ends, got = (float(values[low]), float(values[high])), float(values[code])
    if math.isnan(ends[0]) and math.isnan(ends[1]):
        right = math.isnan(got)
    else:
        right = ends[0] <= got <= ends[1]
    found = judge("x", rule, actual, actual)
    assert found.passed is right and (found.ratio > 1) is not right


def test_a_code_below_an_interval_that_reaches_to_infinity_is_wrong() -> None:
    low, high, actual = (torch.tensor([code], dtype=torch.uint8) for code in (1, 0x7C, 0))
    assert not judge("x", Codes("e5m2", low, high), actual, actual).passed


def test_codes_of_four_bits_are_unpacked() -> None:
    low, high = (torch.tensor(codes, dtype=torch.uint8) for codes in ([1, 2], [1, 3]))
    for packed, passes in ((0x21, True), (0x31, True), (0x41, False), (0x22, False)):
        actual = torch.tensor([packed], dtype=torch.uint8)
        assert judge("x", Codes("e2m1", low, high), actual, actual).passed is passes


@pytest.mark.parametrize("rule", (Bitwise(), Within(torch.tensor(1.0))))
def test_another_shape_is_wrong_even_where_it_would_broadcast(rule: Bitwise | Within) -> None:
    for actual, expected in ((torch.ones(1), torch.ones(4)), (torch.ones(4, 4), torch.ones(4))):
        found = judge("x", rule, actual, expected)
        assert not found.passed and "has shape" in found.message and found.ratio == INF


def test_what_is_open_says_why() -> None:
    found = judge("x", Open("dropout draws its own mask"), _f32(1.0), _f32(2.0))
    assert found.passed and found.rule == "open" and found.message == "dropout draws its own mask"


def test_samples_are_judged_by_their_own_rule() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    rule = Sampled(torch.tensor([0, 5, 11]), Bitwise())
    assert judge("x", rule, whole, _f32(0.0, 5.0, 11.0)).passed
    assert judge("x", rule, whole, _f32(0.0, 5.0, 12.0)).bad == 1


def test_empty_results_pass() -> None:
    for rule in (Bitwise(), Within(torch.tensor(0.0))):
        assert judge("x", rule, torch.empty(0, 3), torch.empty(0, 3)).passed


def test_a_finding_says_where_what_and_how_much() -> None:
    expected = torch.zeros(70, 5)
    actual = expected.clone()
    actual[69, 2], actual[1, 1] = 0.75, 0.5
    found = judge("out", Within(torch.tensor(0.25)), actual, expected)
    assert (found.index, found.ratio, found.bad, found.total) == ((69, 2), 3.0, 2, 350)
    assert found.message == "out[69, 2] is 0.75, expected 0 within 0.25 (2 of 350 elements are wrong)"
    assert sum(found.histogram) == 350 and len(found.histogram) == len(HISTOGRAM) + 1
    assert found.histogram[0] == 348  # no error at all
    assert len(found.heat_map) <= 32 and found.heat_map[-1][2] == 3.0


@settings(deadline=None)
@given(st.sampled_from(FP8_ENCODINGS))
def test_decoding_is_by_code_whatever_the_shape(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    assert torch.equal(decode(codes, name).flatten().nan_to_num(9e9), table(name).nan_to_num(9e9))
