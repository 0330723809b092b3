# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is computed in two ways, a fast one for ordinary operands and one for any, has the same bits in both."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gfx_emulator import Memory, decode, floats, matrix_arithmetic, registry
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
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


def test_decoding_of_what_differs_in_its_operands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats whose operands name another format (a literal, sub-dwords, neighbouring lanes) are told apart."""
    words = (
        "37410887", "37ff40874800000001", "12345678", "0103027e", "ff02027e78563412", "f902027e04060600",
        "fa02027e01e400ff", "0003046a", "ff030468ffff0000", "f903046a06060606", "00c08cbf", "0000c0d100000402",
        "4000d3d1000a0a04", "0080dcdc02020000", "00500ce000000080",
    )  # fmt: skip
    texts = [bytes.fromhex(one).ljust(16, b"\0") for one in words]
    for name, value in (("_known", {}), ("_opcodes", {})):
        monkeypatch.setattr(decode, name, value)
    random = np.random.default_rng(4)
    similar = 0
    for _ in range(4000):
        data = bytearray(texts[random.integers(len(texts))])
        for _ in range(random.integers(1, 4)):
            data[random.integers(8)] = random.integers(256)
        quick = decode._like_another(bytes(data))
        expected = decode._read(bytes(data))
        similar += quick is not None
        assert quick is None or quick == expected
    assert similar > 500


def test_rows_and_columns_of_zeros() -> None:
    """What tiles hold beyond a matrix is left out of products; -0 becomes 0 there, as where it is added."""
    random = np.random.default_rng(5)
    a, b = (drawn(random, (4, 16, 32), 4, -10, 7) for _ in range(2))
    c = drawn(random, (4, 16, 16), 24, -20, 20).astype(np.float32)
    a[1], b[2], a[3, 5:], b[3, :9] = 0, -0.0, 0, 0
    a[:, :, 16:] = 0
    c[random.random(c.shape) < 0.3] = -0.0
    c[0, 0, 0] = 1e-41
    form = fp8_format(8)
    for special in (None, np.inf, np.nan):
        if special is not None:
            b[1, 3, 7] = special
        with np.errstate(invalid="ignore"):
            found, expected = (one(a, b, c, form, form) for one in (matrix_arithmetic.multiply_add, _by_groups))
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def _by_groups(a: Array, b: Array, c: Array, form: Format, _: Format) -> Array:
    for first in range(0, a.shape[2], form.group):
        part = slice(first, first + form.group)
        c = matrix_arithmetic._group_of_any(a[..., part], b[..., part], c, form, form)
    return c


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_minima_and_maxima_without_nan(dtype: type) -> None:
    random = np.random.default_rng(6)
    a, b = (random.choice(np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, 6e-8], dtype), (3, 64)) for _ in range(2))
    for largest in (True, False):
        expected = floats._minimum_of_any(a, b, largest, True)
        found = floats.minimum(a, b, largest, True)
        assert found.dtype == dtype and found.tobytes() == expected.tobytes()


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


def test_instructions_that_read_the_program_counter_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of AMD's library jumped to where another one's instruction stands."""
    monkeypatch.setitem(registry._BUILDERS, "S_GETPC_B64", lambda one, context: lambda active: None)
    context = registry.Context("gfx942")
    shared = {"S_GETPC_B64": False, "S_NOT_B64": True}
    for name, same in shared.items():
        first, second = (
            registry.build(Instruction(place, 4, name, "SOP1", {"sdst": 4, "ssrc0": 6}), context) for place in (0, 64)
        )
        assert (first is second) is same, name
