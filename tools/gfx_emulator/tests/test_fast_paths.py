# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is computed in two ways, a fast one for ordinary operands and one for any, has the same bits in both."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gfx_emulator import Memory, decode, floats, matrix_arithmetic
from gfx_emulator.arrays import Array
from gfx_emulator.instructions import division, vector_integer
from gfx_emulator.matrix_arithmetic import BF16, FP16, XF32, Format, fp8_format
from gfx_emulator.memory import OutsideError


def drawn(random: np.random.Generator, shape: tuple[int, ...], bits: int, lowest: int, highest: int) -> Array:
    """Numbers of so many bits of significand and of a range of exponents, a fifth of them zero."""
    significands = random.integers(-(1 << bits) + 1, 1 << bits, shape).astype(np.float64)
    value = np.ldexp(significands, random.integers(lowest, highest, shape) - bits)
    value[random.random(shape) < 0.2] = 0
    return value


def test_fused_64() -> None:
    random = np.random.default_rng(0)
    a, b = (drawn(random, (3000,), 53, -40, 40) for _ in range(2))
    near = -a * b * (1 + np.exp2(-random.integers(20, 60, a.shape).astype(np.float64)))
    c = np.where(random.random(a.shape) < 0.5, near, drawn(random, a.shape, 53, -200, 200))
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c)]
    assert floats.fused_64(a, b, c).tolist() == exact
    for one in (1e-310, 2.0**-500, 2.0**700):  # by rational arithmetic
        x, y, z = (np.array([value]) for value in (one, 1 / 3, one / 7))
        assert floats.fused_64(x, y, z)[0] == float(Fraction(x[0]) * Fraction(y[0]) + Fraction(z[0]))


def test_fused_32() -> None:
    """Ties, sums below the normal range, and exact zeros, among ordinary numbers."""
    random = np.random.default_rng(1)
    a, b = (drawn(random, (4000,), 24, -80, 60).astype(np.float32) for _ in range(2))
    c = np.where(random.random(a.shape) < 0.3, -(a * b), drawn(random, a.shape, 24, -140, 100)).astype(np.float32)
    exact = floats.fused_odd(a, b, c).astype(np.float32)
    assert np.array_equal(floats.fused_32(a, b, c).view(np.uint32), exact.view(np.uint32))


@pytest.mark.parametrize(
    ("form", "k", "bits", "lowest", "highest"),
    [
        (BF16, 16, 8, -12, 5), (BF16, 8, 8, -60, 50), (BF16, 8, 8, -133, -100), (BF16, 8, 8, 40, 63),
        (FP16, 16, 11, -24, 15), (XF32, 8, 11, -130, 60), (fp8_format(8), 32, 4, -10, 7),
        (fp8_format(15), 32, 3, -16, 15),
    ],
    ids=str,
)  # fmt: skip
def test_sums_of_products(form: Format, k: int, bits: int, lowest: int, highest: int) -> None:
    random = np.random.default_rng(k + bits)
    a, b = (drawn(random, (3, 16, k), bits, lowest, highest) for _ in range(2))
    c = drawn(random, (3, 16, 16), 24, 2 * lowest, 2 * highest).astype(np.float32)
    group, expected = min(form.group, k), c
    for first in range(0, k, group):
        part = slice(first, first + group)
        expected = matrix_arithmetic._group_of_any(a[..., part], b[..., part], expected, form, form)
    found = matrix_arithmetic.multiply_add(a, b, c, form, form)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_products_beyond_fp32_are_infinite() -> None:
    a = np.full((1, 4, 8), 2.0**70)
    found = matrix_arithmetic.multiply_add(a, a, np.zeros((1, 4, 4), np.float32), BF16, BF16)
    assert np.isposinf(found).all()


def test_a_permutation_that_is_the_same_in_every_lane() -> None:
    random = np.random.default_rng(2)
    first, second = (random.integers(0, 1 << 32, (4, 64), np.uint32) for _ in range(2))
    for selector in (0x07050301, 0x0C080A0B, 0x09FF0D00):
        alike = np.full((4, 64), selector, np.uint32)
        other = alike.copy()
        other[3, 63] ^= 1
        expected = vector_integer._perm(first, second, other)
        found = vector_integer._perm(first, second, alike)
        differing = found != expected
        assert not differing[:3].any() and not differing[3, :63].any()
        constant = np.asarray(selector, np.uint32)
        assert np.array_equal(vector_integer._perm(first, second, constant), found)


def test_quotients_that_need_no_scaling() -> None:
    """What `V_DIV_SCALE` leaves to its fast path is what the other one does not change."""
    random = np.random.default_rng(3)
    form = division._SINGLE
    numerator, denominator = (random.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32) for _ in range(2))
    above, below = form.exponent(numerator), form.exponent(denominator)
    with np.errstate(all="ignore"):
        for value in (numerator, denominator):
            result, undo = division._scaled(form, value, denominator, numerator)
            changed = undo | (result.view(np.uint32) != value.view(np.uint32))
            assert not (changed & ~division.near_limits(form, above, below)).any()


def test_decoding_knows_what_it_has_read_by_its_own_bytes() -> None:
    """The same instruction with something else behind it, and one of twice its size that begins alike."""
    mov, long = bytes.fromhex("0103027e"), bytes.fromhex("ff02027e78563412")
    end = bytes.fromhex("000081bf")
    for text in (mov + end, mov + mov, long + end, long + mov):
        names = [one.name for one in decode.decode(text)]
        assert names[0] == "V_MOV_B32" and len(names) == 2
    assert next(decode.decode(long + end))["literal"] == 0x12345678


def test_memory_that_is_found_when_it_is_accessed() -> None:
    data, asked = np.arange(8, dtype=np.uint32), []

    def find(address: int) -> tuple[Array, int, str] | None:
        asked.append(address)
        return (data, 0x10000, "found") if 0x10000 <= address < 0x10020 else None

    memory = Memory(find)
    own = memory.register(np.full(4, 9, np.uint32))
    addresses = np.array([own, 0x10004, own + 4, 0x1001C], np.int64)
    assert memory.load(addresses, 4).view(np.uint32)[:, 0].tolist() == [9, 1, 9, 7]
    memory.store(addresses[1:2], np.array([[1, 1, 0, 0]], np.uint8))
    assert data[1] == 0x101 and asked == [0x10004]
    with pytest.raises(OutsideError, match="30 bytes into the allocation of 32 bytes"):
        memory.load(np.array([0x1001E], np.int64), 4)
    with pytest.raises(OutsideError):
        memory.load(np.array([0x20000], np.int64), 4)
