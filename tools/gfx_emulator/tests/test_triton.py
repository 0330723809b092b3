# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Kernels that Triton compiles for the chips: element-wise, reductions, casts to FP8, products."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from gfx_emulator import AccessError, decode, testing

triton = pytest.importorskip("triton", reason="Triton is not installed: its compiler makes the kernels")
tl = triton.language


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def add_with_wrong_mask(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at <= n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def reduce_rows(x, sums, largest, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(sums + row, tl.sum(value, 0))
    tl.store(largest + row, tl.max(value, 0))


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * n + at, power / tl.sum(power, 0), mask=at < n)


@triton.jit
def divide(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.div_rn(tl.load(x + at), tl.load(y + at)))


@triton.jit
def cast(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def count_and_add(x, total, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.atomic_add(total, tl.sum(value, 0))
    tl.atomic_max(count, tl.max(value, 0))


@triton.jit
def sizes(out):
    place = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    tl.store(out + place, 100 * tl.num_programs(0) + 10 * tl.num_programs(1) + tl.num_programs(2))


@triton.jit
def matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B_BY_COLUMNS: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        at = start + inner
        first = tl.load(a + rows[:, None] * k + at[None, :], mask=(rows[:, None] < m) & (at[None, :] < k), other=0.0)
        inside = (columns[None, :] < n) & (at[:, None] < k)
        if B_BY_COLUMNS:
            second = tl.load(b + columns[None, :] * k + at[:, None], mask=inside, other=0.0)
        else:
            second = tl.load(b + at[:, None] * n + columns[None, :], mask=inside, other=0.0)
        total = tl.dot(first, second, total, input_precision="ieee")
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def compiled(function: object, arch: str, types: dict[str, str], **constants: int) -> testing.Compiled:
    return testing.Compiled(function, {**types, **dict.fromkeys(constants, "constexpr")}, constants, arch)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_add_with_a_ragged_end(arch: str) -> None:
    x, y, out = numbers(3000), numbers(3000, seed=1), numbers(3000, seed=2)
    compiled(add, arch, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, BLOCK=1024)((3,), [x, y, out, 3000])
    assert (out == x + y).all()


def test_wrong_mask_is_reported(arch: str) -> None:
    x, y, out = numbers(3000), numbers(3000), numbers(3000)
    kernel = compiled(add_with_wrong_mask, arch, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, BLOCK=1024)
    with pytest.raises(AccessError, match=r"12000 bytes into the allocation of 12000 bytes at 0x\w+ \(argument 0\)"):
        kernel((3,), [x, y, out, 3000])


@pytest.mark.parametrize("block, n", [(64, 50), (1024, 1000)], ids=["one wave", "four waves"])
def test_row_reductions(arch: str, block: int, n: int) -> None:
    """Integers, whose sums are exact in any order."""
    x = np.random.default_rng(0).integers(-99, 100, (5, n)).astype(np.float32)
    sums, largest = np.zeros(5, np.float32), np.zeros(5, np.float32)
    types = {"x": "*fp32", "sums": "*fp32", "largest": "*fp32", "n": "i32"}
    compiled(reduce_rows, arch, types, BLOCK=block)((5,), [x, sums, largest, n])
    assert (sums == x.sum(1)).all()
    assert (largest == np.maximum(x.max(1), 0)).all()


def test_softmax(arch: str) -> None:
    x = numbers(6, 700) * 5
    out = np.zeros_like(x)
    compiled(softmax, arch, {"x": "*fp32", "out": "*fp32", "n": "i32"}, BLOCK=1024)((6,), [x, out, 700])
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    # LLVM's exponential multiplies by 1/ln 2 before V_EXP_F32: an error of 2^-24 of an argument up to some 40.
    assert np.abs(out / exact - 1).max() < 40 * 2.0**-23


def test_division_is_rounded_correctly(arch: str) -> None:
    """V_DIV_SCALE, V_DIV_FMAS and V_DIV_FIXUP on numbers of every size, subnormal ones and quotients included."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (2, 16384), dtype=np.uint32)
    x, y = bits.view(np.float32)
    special = np.array(
        [0, -0.0, 1, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-126), 3.4e38, 2.0**127, 1.5], np.float32
    )
    x[:121], y[:121] = np.repeat(special, 11), np.tile(special, 11)
    # Quotients next to overflow and in the subnormal range.
    x[1000:4000] = np.ldexp(np.abs(numbers(3000)) + 1, random.integers(90, 120, 3000)).astype(np.float32)
    y[1000:4000] = np.ldexp(np.abs(numbers(3000, seed=1)) + 1, random.integers(-30, 0, 3000)).astype(np.float32)
    x[4000:8000] = np.ldexp(np.abs(numbers(4000)) + 1, random.integers(-30, 0, 4000)).astype(np.float32)
    y[4000:8000] = np.ldexp(np.abs(numbers(4000, seed=1)) + 1, random.integers(90, 127, 4000)).astype(np.float32)
    out = np.zeros(16384, np.float32)
    compiled(divide, arch, {"x": "*fp32", "y": "*fp32", "out": "*fp32"}, BLOCK=1024)((16,), [x, y, out])
    with np.errstate(all="ignore"):
        expected = x / y
    same = (out.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(out) & np.isnan(expected))
    assert same.all(), [(x[i], y[i], out[i], expected[i]) for i in np.nonzero(~same)[0][:5]]


@triton.jit
def divide_64(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) / tl.load(y + at))


def test_division_of_doubles_is_rounded_correctly(arch: str) -> None:
    x, y = np.random.default_rng(0).integers(0, 2**64, (2, 1024), dtype=np.uint64).view(np.float64)
    special = np.array([0, -0.0, 1, np.inf, np.nan, 5e-324, -(2.0**-1022), 1.7e308, 2.0**1023, 1.5], np.float64)
    x[:100], y[:100] = np.repeat(special, 10), np.tile(special, 10)
    out = np.zeros(1024)
    compiled(divide_64, arch, {"x": "*fp64", "y": "*fp64", "out": "*fp64"}, BLOCK=1024)((1,), [x, y, out])
    with np.errstate(all="ignore"):
        expected = x / y
    same = (out.view(np.uint64) == expected.view(np.uint64)) | (np.isnan(out) & np.isnan(expected))
    assert same.all(), [(x[i], y[i], out[i], expected[i]) for i in np.nonzero(~same)[0][:5]]


FP8 = [
    ("gfx942", "fp8e4b8", ml_dtypes.float8_e4m3fnuz), ("gfx942", "fp8e5b16", ml_dtypes.float8_e5m2fnuz),
    ("gfx950", "fp8e4nv", ml_dtypes.float8_e4m3fn), ("gfx950", "fp8e5", ml_dtypes.float8_e5m2),
]  # fmt: skip


@pytest.mark.parametrize("chip, kind, dtype", FP8, ids=[one[1] for one in FP8])
def test_cast_to_fp8(chip: str, kind: str, dtype: type) -> None:
    """Every number of 16 bits as fp32 that is in the encoding's range, and its neighbours."""
    wide = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    largest = float(ml_dtypes.finfo(dtype).max)
    wide = wide[np.isfinite(wide)]
    x = np.concatenate([wide, np.nextafter(wide, np.float32(0)), np.nextafter(wide, np.float32(np.inf))])
    x = np.resize(x[np.abs(x) <= largest], 1 << 18)
    out = np.zeros(x.size, np.uint8)
    kernel = compiled(cast, chip, {"x": "*fp32", "out": f"*{kind}"}, BLOCK=1024)
    assert re.search(r"v_cvt_(scalef32_)?pk_(fp8|bf8)_f32", kernel.assembly)
    kernel((x.size // 1024,), [x, out])
    assert (out == x.astype(dtype).view(np.uint8)).all()


@pytest.mark.parametrize("kind, dtype", [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)], ids=["fp16", "bf16"])
def test_cast_to_sixteen_bits(arch: str, kind: str, dtype: type) -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 65536, dtype=np.uint32).view(np.float32)
    out = np.zeros(x.size, np.uint16)
    compiled(cast, arch, {"x": "*fp32", "out": f"*{kind}"}, BLOCK=1024)((64,), [x, out])
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    nan = np.isnan(expected.astype(np.float32))
    assert np.isnan(out.view(dtype)[nan].astype(np.float32)).all()
    assert (out == expected.view(np.uint16))[~nan].all()


def test_atomics(arch: str) -> None:
    x = np.random.default_rng(0).integers(-50, 100, 4096).astype(np.int32)
    total, count = np.zeros(1, np.int32), np.zeros(1, np.int32)
    types = {"x": "*i32", "total": "*i32", "count": "*i32"}
    compiled(count_and_add, arch, types, BLOCK=512)((8,), [x, total, count])
    assert (total[0], count[0]) == (x.sum(), x.max())


def test_programs_know_how_many_they_are(arch: str) -> None:
    """By arguments that the compiler added."""
    out = np.zeros(24, np.int32)
    compiled(sizes, arch, {"out": "*i32"})((4, 3, 2), [out])
    assert out.tolist() == [432] * 24


PRODUCTS = [
    *((chip, kind, dtype) for chip in testing.ARCHS for kind, dtype in
      (("fp32", np.float32), ("fp16", np.float16), ("bf16", ml_dtypes.bfloat16))),
    *FP8,
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("blocks", [(16, 16, 64), pytest.param((64, 64, 64), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("by_columns", [0, 1], ids=["b by rows", "b by columns"])
@pytest.mark.parametrize("chip, kind, dtype", PRODUCTS, ids=[f"{one[0]} {one[1]}" for one in PRODUCTS])
def test_products_of_integers_are_exact(
    chip: str, kind: str, dtype: type, by_columns: int, blocks: tuple[int, int, int]
) -> None:
    random = np.random.default_rng(0)
    m, n, k = 40, 48, 80
    a, b = (random.integers(-4, 5, shape).astype(dtype) for shape in ((m, k), (k, n)))
    out = np.zeros((m, n), np.float32)
    types = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    kernel = compiled(matmul, chip, types, BM=blocks[0], BN=blocks[1], BK=blocks[2], B_BY_COLUMNS=by_columns)
    assert "v_mfma_" in kernel.assembly
    stored = np.ascontiguousarray(b.T) if by_columns else b
    kernel((-(-m // blocks[0]), -(-n // blocks[1])), [a.view(np.uint8), stored.view(np.uint8), out, m, n, k])
    assert (out == a.astype(np.float32) @ b.astype(np.float32)).all()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chip, kind, dtype", PRODUCTS, ids=[f"{one[0]} {one[1]}" for one in PRODUCTS])
def test_code_is_decoded_as_the_assembler_wrote_it(chip: str, kind: str, dtype: type) -> None:
    types = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
    kernel = compiled(matmul, chip, types, BM=16, BN=16, BK=64, B_BY_COLUMNS=0)
    written = re.findall(r"^\t((?:[sv]|ds|buffer|global)_\w+)", kernel.assembly, re.MULTILINE)
    expected = [re.sub(r"_(e32|e64|sdwa|dpp)$", "", one).upper() for one in written]
    found = [one.name for one in decode.decode(kernel.kernel.text)]
    # The assembler fills up to an aligned label with S_NOP.
    assert [one for one in found if one != "S_NOP"] == [one for one in expected if one != "S_NOP"]
