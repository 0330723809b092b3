# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix instructions: where their operands' elements are, and how products are summed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gfx_emulator import NotImplementedInstruction, floats, fp8, matrix_arithmetic, testing
from gfx_emulator.code_object import Kernel
from gfx_emulator.matrix_arithmetic import BF16, FP16, XF32, Format, fp8_format

#: (mnemonic, m, k, blocks, bytes of an element, chips); n is m.
INSTRUCTIONS = [
    ("v_mfma_f32_32x32x2_f32", 32, 2, 1, 4, ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x4_f32", 16, 4, 1, 4, ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x1_2b_f32", 32, 1, 2, 4, ("gfx942",)),
    ("v_mfma_f32_32x32x8_f16", 32, 8, 1, 2, ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x16_f16", 16, 16, 1, 2, ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x4_4b_f16", 16, 4, 4, 2, ("gfx942",)),
    ("v_mfma_f32_4x4x4_16b_f16", 4, 4, 16, 2, ("gfx942",)),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, 1, 2, ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, 1, 2, ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x16_f16", 32, 16, 1, 2, ("gfx950",)),
    ("v_mfma_f32_16x16x32_f16", 16, 32, 1, 2, ("gfx950",)),
    ("v_mfma_f32_32x32x16_bf16", 32, 16, 1, 2, ("gfx950",)),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, 1, 2, ("gfx950",)),
    ("v_mfma_f32_32x32x4_xf32", 32, 4, 1, 4, ("gfx942",)),
    ("v_mfma_f32_16x16x8_xf32", 16, 8, 1, 4, ("gfx942",)),
    ("v_mfma_f32_32x32x16_fp8_bf8", 32, 16, 1, 1, ("gfx942", "gfx950")),
    ("v_mfma_f32_16x16x32_bf8_fp8", 16, 32, 1, 1, ("gfx942", "gfx950")),
    ("v_mfma_f32_32x32x64_f8f6f4", 32, 64, 1, 1, ("gfx950",)),
    ("v_mfma_f32_16x16x128_f8f6f4", 16, 128, 1, 1, ("gfx950",)),
    ("v_mfma_i32_32x32x16_i8", 32, 16, 1, 1, ("gfx942", "gfx950")),
    ("v_mfma_i32_16x16x32_i8", 16, 32, 1, 1, ("gfx942", "gfx950")),
]
CASES = [pytest.param(*one[:5], chip, id=f"{one[0]}-{chip}") for one in INSTRUCTIONS for chip in one[5]]


def program(mnemonic: str, words: int, registers: int, arch: str, accumulate_in_agprs: bool) -> Kernel:
    """D = A B + C on registers whose words are in memory one after the other, 64 lanes each."""
    text = "s_load_dwordx8 s[4:11], s[0:1], 0x0\n v_lshlrev_b32 v1, 2, v0\n s_waitcnt lgkmcnt(0)\n"

    def step(word: int) -> str:
        return f"v_add_u32 v2, {256 * word}, v1\n"

    for base, pointer, count in ((8, 4, words), (24, 6, words), (64, 8, registers)):
        for word in range(count):
            text += step(word) + f"global_load_dword v{base + word}, v2, s[{pointer}:{pointer + 1}]\n"
    sums = f"v[64:{63 + registers}]"
    if accumulate_in_agprs:
        text += "".join(f"v_accvgpr_write_b32 a{word}, v{64 + word}\n" for word in range(registers))
        sums = f"a[0:{registers - 1}]"
    a, b = (f"v[{base}:{base + words - 1}]" if words > 1 else f"v{base}" for base in (8, 24))
    text += f"{mnemonic} {sums}, {a}, {b}, {sums}\n s_nop 7\n s_nop 7\n"
    if accumulate_in_agprs:
        text += "".join(f"v_accvgpr_read_b32 v{64 + word}, a{word}\n" for word in range(registers))
    for word in range(registers):
        text += step(word) + f"global_store_dword v2, v{64 + word}, s[10:11]\n"
    return testing.assembled(text + "s_endpgm", arch, vgprs=160, accum_offset=128)


def place_of_operand(lane: int, element: int, side: int, k: int, blocks: int) -> tuple[int, int, int]:
    """(block, row, k) of an element of A (or B, transposed) in a lane."""
    kept = side * k * blocks // 64
    group, row = divmod(lane, side)
    if kept == 32:
        half, rest = divmod(element, 16)
        return 0, row, 16 * (64 // side) * half + 16 * group + rest
    return (group, row, element) if blocks > 1 else (0, row, group * kept + element)


def place_of_sum(lane: int, register: int, m: int) -> tuple[int, int, int]:
    """(block, row, column) of an element of C and D."""
    if m == 4:
        return lane // 4, register, lane % 4
    rows = m * m // 64
    block, inner = divmod(register, rows)
    return block, 4 * (64 // m) * (inner // 4) + 4 * (lane // m) + inner % 4, lane % m


def encoded(values: np.ndarray, mnemonic: str, side: int, arch: str) -> np.ndarray:
    """Small integers as elements of the instruction's types."""
    types = mnemonic.split("_", 4)[-1] if "_fp8_" in mnemonic or "_bf8_" in mnemonic else mnemonic.rsplit("_", 1)[1]
    if types == "f16":
        return values.astype(np.float16)
    if types == "bf16":
        return floats.bf16(values.astype(np.float32))
    if types in ("f32", "xf32"):
        return values.astype(np.float32)
    if types == "i8":
        return values.astype(np.int8)
    kind = "FP8" if types == "f8f6f4" else mnemonic.rsplit("_", 2)[1 + side].upper()
    return fp8.encoding(arch, kind).encode(values.astype(np.float32), False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mnemonic, m, k, blocks, size, arch", CASES)
def test_layout(mnemonic: str, m: int, k: int, blocks: int, size: int, arch: str) -> None:
    """Integers that the sums hold exactly, placed and read by the manuals' formulas."""
    random = np.random.default_rng(0)
    a, b = (random.integers(-3, 4, (blocks, m, k)) for _ in range(2))
    kept, registers = m * k * blocks // 64, m * m * blocks // 64
    lanes = []
    for side, matrix in enumerate((a, b)):
        elements = np.array([
            [matrix[place_of_operand(lane, element, m, k, blocks)] for element in range(kept)] for lane in range(64)
        ])  # fmt: skip
        lanes.append(encoded(elements, mnemonic, side, arch).view(np.uint32).reshape(64, -1).T.copy())
    whole = np.int32 if "_i32_" in mnemonic else np.float32
    c = random.integers(-9, 10, (blocks, m, m))
    registers_c = np.array([[c[place_of_sum(lane, r, m)] for lane in range(64)] for r in range(registers)]).astype(
        whole
    )
    out = np.zeros((registers, 64), whole)
    kernel = program(mnemonic, len(lanes[0]), registers, arch, accumulate_in_agprs=m == 32)
    testing.run(kernel, [*lanes, registers_c, out])
    product = np.einsum("bmk,bnk->bmn", a, b) + c
    expected = [[product[place_of_sum(lane, r, m)] for lane in range(64)] for r in range(registers)]
    assert (out == np.array(expected)).all()


def test_scaled_product_multiplies_blocks_of_32() -> None:
    """V_MFMA_SCALE: a lane's scale, an E8M0 number is of 32 consecutive k of its row; another lane has half of them."""
    random = np.random.default_rng(0)
    a, b = (random.integers(-3, 4, (32, 64)) for _ in range(2))
    scales = random.integers(125, 130, (2, 64), dtype=np.uint32)
    lanes = [
        encoded(np.array([[m[place_of_operand(lane, element, 32, 64, 1)[1:]] for element in range(32)]
                          for lane in range(64)]), "_f8f6f4", 0, "gfx950")
        .view(np.uint32).T.copy() for m in (a, b)
    ]  # fmt: skip
    out = np.zeros((16, 64), np.float32)
    testing.run(scaled_program(), [lanes[0], np.concatenate([lanes[1], scales]), np.zeros((16, 64), np.float32), out])
    factor = np.exp2(scales.astype(np.float64) - 127).reshape(2, 2, 32).transpose(0, 2, 1).repeat(32, axis=2)
    product = (a * factor[0]) @ (b * factor[1]).T
    expected = [[product[place_of_sum(lane, r, 32)[1:]] for lane in range(64)] for r in range(16)]
    assert (out == np.array(expected)).all()


def scaled_program() -> Kernel:
    """The scales are loaded as if they were further words of B."""
    text = "s_load_dwordx8 s[4:11], s[0:1], 0x0\n v_lshlrev_b32 v1, 2, v0\n s_waitcnt lgkmcnt(0)\n"
    for base, pointer, count in ((8, 4, 8), (24, 6, 10), (64, 8, 16)):
        for word in range(count):
            text += f"v_add_u32 v2, {256 * word}, v1\n"
            text += f"global_load_dword v{base + word}, v2, s[{pointer}:{pointer + 1}]\n"
    text += "v_mfma_scale_f32_32x32x64_f8f6f4 v[64:79], v[8:15], v[24:31], v[64:79], v32, v33 op_sel_hi:[0,0,0]\n"
    for word in range(16):
        text += f"v_add_u32 v2, {256 * word}, v1\n global_store_dword v2, v{64 + word}, s[10:11]\n"
    return testing.assembled(text + "s_endpgm", "gfx950", vgprs=160, accum_offset=128)


def test_formats_that_are_not_implemented_are_named() -> None:
    kernel = testing.assembled(
        "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:19], v[20:27], v[0:15] cbsz:4\n s_endpgm", "gfx950"
    )
    with pytest.raises(NotImplementedInstruction, match=r"V_MFMA_F32_32X32X64_F8F6F4 .*formats \(4, 0\)"):
        testing.run(kernel, [])


def floor_to(value: Fraction, exponent: int, bits: int) -> Fraction:
    unit = Fraction(2) ** (exponent - bits)
    return (value // unit) * unit


def trunc_to(value: Fraction, exponent: int, bits: int) -> Fraction:
    return floor_to(value, exponent, bits) if value >= 0 else -floor_to(-value, exponent, bits)


def exponent_of(value: Fraction, smallest: int) -> int:
    power = smallest
    while abs(value) >= Fraction(2) ** (power + 1):
        power += 1
    return power


def summed(a: list[Fraction], b: list[Fraction], c: Fraction, one: Format, other: Format) -> Fraction:
    """The model of `matrix_arithmetic` in rational numbers, one group of products, before rounding to fp32."""
    products = [
        (x * y, exponent_of(x, one.smallest_exponent) + exponent_of(y, other.smallest_exponent)) for x, y in zip(a, b)
    ]

    def aligned(terms: list[tuple[Fraction, int]]) -> tuple[Fraction, int]:
        largest = max([power for value, power in terms if value], default=-999)
        return sum((trunc_to(value, largest, 24) for value, _ in terms), Fraction(0)), largest

    if one.halves:
        even, odd = aligned(products[::2]), aligned(products[1::2])
        top = max(even[1], odd[1])
        dot = floor_to(even[0], top, 24) + floor_to(odd[0], top, 24)
    else:
        dot, top = aligned(products)
    own = exponent_of(c, -126)
    largest = max(top, own)
    rest = floor_to(c, largest, 24)
    if one.halves and own < largest - 25:
        rest = Fraction(0)
    total = floor_to(dot, largest, 32) + rest
    return floor_to(total, exponent_of(total, -126), 31)


@pytest.mark.parametrize(
    "kind, form",
    [("bf16", BF16), ("fp16", FP16), ("xf32", XF32), ("e4m3fnuz", fp8_format(8)), ("e5m2", fp8_format(15))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sums_follow_the_model(kind: str, form: Format) -> None:
    """Numbers of very different sizes: what is cut, where and in which direction is seen in the last bits."""
    random = np.random.default_rng(3)
    values = {
        "bf16": lambda x: floats.from_bf16(floats.bf16(x)),
        "fp16": lambda x: x.astype(np.float16).astype(np.float32),
        "xf32": lambda x: (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32),
        "e4m3fnuz": lambda x: fp8.E4M3_FNUZ.decode(fp8.E4M3_FNUZ.encode(x, True)),
        "e5m2": lambda x: fp8.E5M2_OCP.decode(fp8.E5M2_OCP.encode(x, True)),
    }[kind]
    m = 8

    def matrix(*shape: int) -> np.ndarray:
        sizes = np.exp2(random.integers(-6, 7, shape)).astype(np.float32)
        return random.standard_normal(shape).astype(np.float32) * sizes

    a, b = (values(matrix(m, form.group)) for _ in range(2))
    c = matrix(m, m) * np.float32(64)
    c[0] = 0
    got = matrix_arithmetic.multiply_add(
        a.astype(np.float64)[None], b.astype(np.float64)[None], c[None], form, form
    )[0]  # fmt: skip
    for i in range(m):
        for j in range(m):
            exact = summed(
                [Fraction(float(x)) for x in a[i]],
                [Fraction(float(x)) for x in b[j]],
                Fraction(float(c[i, j])),
                form,
                form,
            )
            # At most 32 bits: float64 holds it, and rounds once to fp32.
            assert np.float32(float(exact)) == got[i, j], (i, j)


def test_special_values_of_sums() -> None:
    def one(a: list[float], b: list[float], c: float) -> np.float32:
        first, second = (np.array(values, np.float64)[None, None] for values in (a, b))
        with np.errstate(all="ignore"):
            return matrix_arithmetic.multiply_add(first, second, np.full((1, 1, 1), c, np.float32), BF16, BF16)[0, 0, 0]

    assert np.isnan(one([np.inf], [0.0], 1.0))
    assert np.isnan(one([np.inf, 1.0], [1.0, 1.0], -np.inf))
    assert one([np.inf, 1.0], [1.0, 1.0], 5.0) == np.inf
    assert one([2.0**100], [2.0**100], 0.0) == np.inf
    assert np.isnan(one([2.0**100, -(2.0**100)], [2.0**100, 2.0**100], 0.0)), "Inf - Inf, each product beyond fp32"
    assert one([0.0], [0.0], -1.5) == -1.5
    assert np.isnan(one([1.0], [1.0], np.nan))


def test_fp32_products_are_chained_in_the_order_of_k() -> None:
    a = np.array([[[1.0, 2.0**-24, 2.0**-24, 2.0**-24]]], np.float32)
    b = np.ones((1, 1, 4), np.float32)
    assert matrix_arithmetic.multiply_add_32(a, b, np.zeros((1, 1, 1), np.float32))[0, 0, 0] == 1.0
    assert matrix_arithmetic.multiply_add_32(a[..., ::-1], b, np.zeros((1, 1, 1), np.float32))[0, 0, 0] == 1 + 2.0**-22
