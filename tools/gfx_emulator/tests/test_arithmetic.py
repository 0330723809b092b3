# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arithmetic that the manuals' pseudocode does not define, or not so that it can be interpreted: against Python's
integers, rational numbers and other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gfx_emulator import Memory, NotImplementedInstruction, floats, fp8, registry
from gfx_emulator.decode import Instruction
from gfx_emulator.instructions.lanes import swizzle_pattern
from gfx_emulator.lds import Lds
from gfx_emulator.pseudocode import rounded
from gfx_emulator.registers import Active, Batch
from gfx_emulator.vector_forms import lane_pattern

WAVES = 4


def machine() -> Batch:
    zeros = np.zeros(WAVES, np.int64)
    return Batch(Memory(), Lds(1, 0), zeros, zeros.astype(np.uint8), 16, 16)


def evaluate(
    name: str, *sources: np.ndarray, arch: str = "gfx942", form: str = "VOP3", old: int = 0, mode: int = 0,
    **fields: int,
) -> np.ndarray:  # fmt: skip
    """A vector instruction on uint32 ``[256]`` operands: the register that it writes."""
    batch = machine()
    batch.vector[8] = old
    batch.mode[:] = mode
    for index, source in enumerate(sources):
        batch.vector[index] = np.resize(source.view(np.uint32), (WAVES, 64))
    given = {f"src{i}": 256 + i for i in range(len(sources))} | {"vdst": 264}
    given |= {"neg": 0, "abs": 0, "opsel": 0, "omod": 0, "clmp": 0} | fields
    with np.errstate(all="ignore"):
        built = registry.build(Instruction(0, 8, name, form, given), registry.Context(arch))
        built(Active(batch, slice(None)))
    return batch.vector[8].reshape(-1).copy()


def bits(seed: int, count: int = 64 * WAVES) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 2**32, count, dtype=np.uint32) >> random.integers(0, 32, count, dtype=np.uint32)


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) & 1 else value


def perm(a: int, b: int, selector: int) -> int:
    parts = (a << 32 | b).to_bytes(8, "little")
    chosen = []
    for byte in selector.to_bytes(4, "little"):
        if byte >= 13:
            chosen.append(0xFF)
        elif byte == 12:
            chosen.append(0)
        elif byte >= 8:
            chosen.append(0xFF * (parts[2 * (byte - 8) + 1] >> 7))
        else:
            chosen.append(parts[byte])
    return int.from_bytes(bytes(chosen), "little")


INTEGER: dict[str, tuple[int, Callable[..., int]]] = {
    "V_PERM_B32": (3, perm),
    "V_BFE_I32": (3, lambda a, b, c: signed(signed(a, 32) >> (b & 31) & (1 << (c & 31)) - 1, c & 31) if c & 31 else 0),
    "V_BFREV_B32": (1, lambda a: int(f"{a:032b}"[::-1], 2)),
    "V_FFBH_U32": (1, lambda a: 32 - a.bit_length() if a else -1),
    "V_FFBL_B32": (1, lambda a: (a & -a).bit_length() - 1 if a else -1),
    "V_BCNT_U32_B32": (2, lambda a, b: a.bit_count() + b),
    "V_MUL_HI_I32": (2, lambda a, b: signed(a, 32) * signed(b, 32) >> 32),
    "V_MED3_I32": (3, lambda *x: sorted(signed(one, 32) for one in x)[1]),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integers(name: str) -> None:
    count, function = INTEGER[name]
    sources = [bits(seed) for seed in range(count)]
    if name == "V_PERM_B32":
        sources[2] = np.random.default_rng(9).integers(0, 16, 1024, dtype=np.uint8).view(np.uint32)
    expected = [function(*(int(x) for x in row)) & 0xFFFFFFFF for row in zip(*sources)]
    assert evaluate(name, *sources).tolist() == expected


def test_bitop3_is_any_function_of_three_bits() -> None:
    a, b, c = (np.full(256, value, np.uint32) for value in (0xF0, 0xCC, 0xAA))
    for table in (0x00, 0x01, 0x6A, 0x96, 0xE8, 0xFF):
        fields = {"neg": table & 7, "abs": table >> 3 & 7, "omod": table >> 6}
        assert evaluate("V_BITOP3_B32", a, b, c, arch="gfx950", **fields)[0] & 0xFF == table
        assert evaluate("V_BITOP3_B16", a, b, c, arch="gfx950", **fields)[0] & 0xFF == table


def test_lanes_below_are_counted() -> None:
    ones = np.full(256, 0xFFFFFFFF, np.uint32)
    low = evaluate("V_MBCNT_LO_U32_B32", ones, np.zeros(256, np.uint32))
    assert evaluate("V_MBCNT_HI_U32_B32", ones, low).tolist() == list(range(64)) * WAVES


def test_clamped_differences_stay_in_range() -> None:
    a, b = np.full(256, 3, np.uint32), np.full(256, 5, np.uint32)
    assert evaluate("V_SUB_U32", a, b, clmp=1)[0] == 0
    assert evaluate("V_SUB_U32", a, b)[0] == 2**32 - 2
    top = np.full(256, 2**31 - 1, np.uint32)
    assert evaluate("V_ADD_I32", top, b, clmp=1)[0] == 2**31 - 1


def test_fused_multiply_add_is_rounded_once() -> None:
    """Also where the double rounding of a sum in float64 would show: ties and subnormal results."""
    random = np.random.default_rng(0)
    a, b, c = (random.integers(0, 2**32, 256, dtype=np.uint32).view(np.float32) for _ in range(3))
    a[:128] = 1 + random.integers(0, 2**12, 128) * np.float32(2.0**-12)
    b[:128] = 1 + random.integers(0, 2**12, 128) * np.float32(2.0**-12)
    c[:64] = np.ldexp(np.float32(1), random.integers(-60, -20, 64)) * random.choice([-1, 1], 64)
    c[64:128] = np.ldexp(a[64:128], 25)
    a[128:160], b[128:160] = np.ldexp(a[:32], -75), np.ldexp(b[:32], -74)
    c[128:160] = 2.0**-149
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    got = evaluate("V_FMA_F32", a, b, c)
    for x, y, z, one in zip(a[finite], b[finite], c[finite], got[finite]):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert int(one) == rounded(exact, 32), (x, y, z)


def test_fused_multiply_add_of_halves_is_rounded_once() -> None:
    random = np.random.default_rng(1)
    a, b, c = (random.integers(0, 0x7C00, 4096, dtype=np.uint16) for _ in range(3))
    with np.errstate(over="ignore"):
        got = floats.half(floats.fused_odd(*(x.view(np.float16).astype(np.float32) for x in (a, b, c))))
    for x, y, z, one in zip(*(v.view(np.float16) for v in (a, b, c)), got):
        assert int(one) == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), 16)


def test_nan_are_the_chips() -> None:
    """The positive default where none came in; else the first that did, quieted."""
    infinity, one = np.full(256, np.inf, np.float32), np.full(256, 1, np.float32)
    assert evaluate("V_SUB_F32", infinity, infinity)[0] == 0x7FC00000
    signaling = np.full(256, 0xFF800003, np.uint32)
    assert evaluate("V_ADD_F32", one, signaling)[0] == 0xFFC00003
    assert evaluate("V_FMA_F32", one, signaling, np.full(256, 0x7FC00001, np.uint32))[0] == 0xFFC00003


def test_subnormals_are_kept_or_flushed_by_mode() -> None:
    tiny = np.full(256, 3, np.uint32)
    assert evaluate("V_ADD_F32", tiny, tiny)[0] == 6
    batch = machine()
    batch.vector[0] = 3
    fields = {"src0": 256, "src1": 256, "vdst": 264, "neg": 1, "abs": 0, "opsel": 0, "omod": 0, "clmp": 0}
    registry.build(Instruction(0, 8, "V_MUL_F32", "VOP3", fields), registry.Context("gfx942", flush_32=True))(
        Active(batch, slice(None))
    )
    assert batch.vector[8, 0, 0] == 0x80000000


@pytest.mark.parametrize(
    "name, function",
    [
        ("V_EXP_F32", lambda x: 2.0**x), ("V_LOG_F32", lambda x: math.log2(abs(x))),
        ("V_RCP_F32", lambda x: 1 / x), ("V_SQRT_F32", lambda x: math.sqrt(abs(x))),
        ("V_RSQ_F32", lambda x: 1 / math.sqrt(abs(x))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_transcendental_functions_are_the_exact_ones_rounded(name: str, function: Callable[[float], float]) -> None:
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32) * 20
    x = x if name in ("V_EXP_F32", "V_RCP_F32") else np.abs(x)
    got = evaluate(name, x).view(np.float32)
    expected = np.array([function(float(one)) for one in x])
    assert (got == expected.astype(np.float32)).all()


def test_exponential_flushes_what_is_below_the_normal_range() -> None:
    x = np.array([-126, -126.5, -149, 128, -np.inf, 2.0**-140], np.float32)
    assert evaluate("V_EXP_F32", np.resize(x, 256)).view(np.float32)[:6].tolist() == [2.0**-126, 0, 0, np.inf, 0, 1]


def test_rounding_to_integers() -> None:
    x = np.resize(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 8388609, -0.0], np.float32), 256)
    assert evaluate("V_RNDNE_F32", x).view(np.float32)[:8].tolist() == [0, 2, 2, 0, -2, 0, 8388609, 0]
    assert evaluate("V_FRACT_F32", np.full(256, -1e-10, np.float32)).view(np.float32)[0] == np.nextafter(
        np.float32(1), 0
    )


def test_conversions_to_integers_saturate() -> None:
    x = np.resize(np.array([1.9, -1.9, 3e9, 5e9, -3e9, np.nan, np.inf, -np.inf], np.float32), 256)
    assert evaluate("V_CVT_U32_F32", x)[:8].tolist() == [1, 0, 3000000000, 2**32 - 1, 0, 0, 2**32 - 1, 0]
    top, bottom = 2**31 - 1, -(2**31)
    assert evaluate("V_CVT_I32_F32", x).view(np.int32)[:8].tolist() == [1, -1, top, top, bottom, 0, top, bottom]


CLASSES = [0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000, 0, 1, 0x3F800000, 0x7F800000]


def test_every_number_is_of_one_class() -> None:
    """V_CMP_CLASS_F32: signaling NaN, quiet NaN, -Inf, negative normal, subnormal and zero, and the positive ones."""
    for place, pattern in enumerate(CLASSES):
        for wanted in range(10):
            batch = machine()
            batch.vector[0], batch.vector[1] = pattern, 1 << wanted
            fields = {"src0": 256, "src1": 257, "vdst": 10, "neg": 0, "abs": 0, "opsel": 0, "omod": 0, "clmp": 0}
            built = registry.build(Instruction(0, 8, "V_CMP_CLASS_F32", "VOP3", fields), registry.Context("gfx942"))
            built(Active(batch, slice(None)))
            assert (batch.scalar[10, 0] != 0) == (place == wanted), (hex(pattern), wanted)


ENCODINGS = [
    (fp8.E4M3_FNUZ, ml_dtypes.float8_e4m3fnuz, "gfx942", "FP8"),
    (fp8.E5M2_FNUZ, ml_dtypes.float8_e5m2fnuz, "gfx942", "BF8"),
    (fp8.E4M3_OCP, ml_dtypes.float8_e4m3fn, "gfx950", "FP8"), (fp8.E5M2_OCP, ml_dtypes.float8_e5m2, "gfx950", "BF8"),
]  # fmt: skip


@pytest.mark.parametrize("code, dtype, arch, kind", ENCODINGS, ids=["e4m3fnuz", "e5m2fnuz", "e4m3fn", "e5m2"])
def test_fp8_encodings(code: fp8.Encoding, dtype: type, arch: str, kind: str) -> None:
    """Every code decodes and every bfloat16 and its fp32 neighbours encode as `ml_dtypes` has them."""
    known = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    assert np.array_equal(code.values, known, equal_nan=True)
    wide = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    wide = wide[np.isfinite(wide)]
    x = np.concatenate([wide, np.nextafter(wide, np.float32(0)), np.nextafter(wide, np.float32(1e38))])
    inside = np.abs(x) <= code.largest
    assert (code.encode(x[inside], False) == x[inside].astype(dtype).view(np.uint8)).all()
    assert (np.abs(code.decode(code.encode(x[~inside], True))) >= code.largest).all()
    assert np.isnan(code.decode(code.encode(np.array([np.nan], np.float32), True)))[0]


@pytest.mark.parametrize("code, dtype, arch, kind", ENCODINGS, ids=["e4m3fnuz", "e5m2fnuz", "e4m3fn", "e5m2"])
def test_conversions_to_fp8(code: fp8.Encoding, dtype: type, arch: str, kind: str) -> None:
    """Both halves of the target, FP16_OVFL, and back."""
    a, b = np.full(256, 1.5, np.float32), np.full(256, 1e6, np.float32)
    saturated = int(code.encode(np.float32(1e6), True))
    low, high = int(code.encode(np.float32(1.5), False)), int(code.encode(np.float32(1e6), False))
    assert low | high << 8 == evaluate(f"V_CVT_PK_{kind}_F32", a, b, arch=arch, old=0xABCD0000)[0] & 0xFFFF
    upper = evaluate(f"V_CVT_PK_{kind}_F32", a, b, arch=arch, old=0x1234, opsel=8, mode=1 << 23)[0]
    assert upper == 0x1234 | (low | saturated << 8) << 16
    back = evaluate(f"V_CVT_F32_{kind}", np.full(256, low << 8, np.uint32), arch=arch, opsel=2)[0]
    assert back.view(np.float32) == 1.5


@pytest.mark.parametrize("mode", [0, 1 << 9], ids=["plain", "ieee"])
@pytest.mark.parametrize("verb", ["MIN", "MAX"])
def test_packed_maxima_are_those_of_each_half(verb: str, mode: int) -> None:
    """Signaling NaN, infinities and zeros of both signs among them; ``op_sel`` exchanges an operand's halves."""
    special = np.array([0, 0x8000, 0x7C00, 0xFC00, 0x7C01, 0xFD00, 0x7E00, 1, 0x3C00], np.uint32)
    a, b = (np.concatenate([np.repeat(special, 9) if first else np.tile(special, 9), bits(3 + first, 175) & 0xFFFF])
            for first in (1, 0))  # fmt: skip
    c, d = bits(5) & 0xFFFF, bits(6) & 0xFFFF
    half = lambda x, y: evaluate(f"V_{verb}_F16", x, y, mode=mode) & 0xFFFF  # noqa: E731
    packed = evaluate(
        f"V_PK_{verb}_F16",
        a | c << 16,
        d | b << 16,
        form="VOP3P",
        mode=mode,
        opsel=2,
        opsel_hi=1,
        opsel_hi2=0,
        neg_hi=0,
    )
    assert (packed == (half(a, b) | half(c, d) << 16)).all()


def test_scaled_conversions_use_the_scales_exponent() -> None:
    a, scale = np.full(256, 6.0, np.float32), np.full(256, 3.9, np.float32)
    code = evaluate("V_CVT_SCALEF32_PK_FP8_F32", a, a, scale, arch="gfx950")[0] & 0xFF
    assert fp8.E4M3_OCP.decode(np.array([code]))[0] == 3.0


def test_stochastic_rounding_below_the_normal_range_is_not_made_up() -> None:
    with pytest.raises(NotImplementedInstruction, match="V_CVT_SR_FP8_F32 of a number below"):
        evaluate("V_CVT_SR_FP8_F32", np.full(256, 2.0**-9, np.float32), np.zeros(256, np.uint32))


@pytest.mark.parametrize(
    "control, expected",
    [
        (0x1B, lambda i: (i & ~3) + 3 - (i & 3)),  # quad_perm:[3,2,1,0]
        (0x101, lambda i: i + 1 if i % 16 < 15 else None),  # row_shl:1
        (0x112, lambda i: i - 2 if i % 16 > 1 else None),  # row_shr:2
        (0x124, lambda i: i // 16 * 16 + (i - 4) % 16),  # row_ror:4
        (0x138, lambda i: i - 1 if i else None),  # wave_shr:1
        (0x140, lambda i: i // 16 * 16 + 15 - i % 16),  # row_mirror
        (0x141, lambda i: i // 8 * 8 + 7 - i % 8),  # row_half_mirror
        (0x142, lambda i: i // 16 * 16 - 1 if i >= 16 else None),  # row_bcast:15
        (0x143, lambda i: 31 if i >= 32 else None),  # row_bcast:31
        (0x153, lambda i: i // 16 * 16 + 3),  # row_newbcast:3
    ],
    ids=lambda value: hex(value) if isinstance(value, int) else "",
)
def test_lanes_that_dpp_reads(control: int, expected: Callable[[int], int | None]) -> None:
    lanes, valid = lane_pattern(control)
    found = [int(lane) if exists else None for lane, exists in zip(lanes, np.broadcast_to(valid, 64))]
    assert found == [expected(i) for i in range(64)]


@pytest.mark.parametrize("bound", [0, 1])
def test_dpp_writes_where_it_may(bound: int) -> None:
    """row_shr:1 with the first two rows enabled: without bound_ctrl a lane without a neighbour keeps its value."""
    fields = {"vsrc0": 256, "dpp": 0x111, "bc": bound, "row_mask": 3, "bank_mask": 15, "src0_neg": 0, "src0_abs": 0}
    value = np.arange(256, dtype=np.uint32) % 64 + 100
    got = evaluate("V_MOV_B32", value, form="VOP1_DPP16", old=7, **fields)[:64]
    first = 0 if bound else 7
    assert got.tolist() == [first, *range(100, 115), first, *range(116, 131), *[7] * 32]


@pytest.mark.parametrize(
    "selection, extended, expected",
    [(1, 0, 0x80), (1, 1, 0xFFFFFF80), (5, 0, 0x8070), (5, 1, 0xFFFF8070), (6, 0, 0x80708090)],
)
def test_sdwa_takes_a_part_of_an_operand(selection: int, extended: int, expected: int) -> None:
    fields = {
        "vsrc0": 256, "src0_sel": selection, "src0_sext": extended, "s0": 0, "dst_sel": 6, "dst_unused": 0,
        "src0_neg": 0, "src0_abs": 0,
    }  # fmt: skip
    assert evaluate("V_MOV_B32", np.full(256, 0x80708090, np.uint32), form="VOP1_SDWA", **fields)[0] == expected


@pytest.mark.parametrize("unused, expected", [(0, 0x00FE0000), (1, 0xFFFE0000), (2, 0x11FE3344)])
def test_sdwa_writes_a_part_of_the_target(unused: int, expected: int) -> None:
    fields = {
        "vsrc0": 256, "src0_sel": 6, "src0_sext": 0, "s0": 0, "dst_sel": 2, "dst_unused": unused, "src0_neg": 0,
        "src0_abs": 0,
    }  # fmt: skip
    assert (
        evaluate("V_MOV_B32", np.full(256, 0xFE, np.uint32), form="VOP1_SDWA", old=0x11223344, **fields)[0] == expected
    )


def test_swizzles() -> None:
    assert swizzle_pattern(0x041F).tolist() == [i ^ 1 for i in range(64)]
    assert swizzle_pattern(0x8000 | 0b00011011).tolist() == [(i & ~3) + 3 - (i & 3) for i in range(64)]
    assert swizzle_pattern(0x0010).tolist() == [i & 0x30 for i in range(64)]
