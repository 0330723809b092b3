# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix instructions (V_MFMA) and moves to and from accumulation registers.

Layouts are those of AMD's "CDNA 3" and "CDNA 4 Instruction Set Architecture", chapter "Matrix Arithmetic Instructions".
A is m by k, B is k by n. A lane holds consecutive k of one row of A or column of B: lane = row + m * (k // kept), where
`kept` elements are in a lane. Of C and D a lane holds a column: register r of lane l is row
4 * (64 / n) * (r // 4) + 4 * (l // n) + r % 4, column l % n. Instructions on several blocks have the blocks' A and B
one after the other in the lanes, and their C and D in the registers; of 4 by 4 blocks all are in the lanes.

Of 8-bit operands of F8F6F4 a lane holds 16 consecutive k, from 16 * (lane // m) on, and the 16 that lie 16 * (64 // m)
further; its scale is that of 32 consecutive k, from 32 * (lane // m) on. These are the layouts that Triton gives
operands and scales on gfx950 (``#ttg.dot_op`` with ``kWidth = 16``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx_emulator import floats, fp8, matrix_arithmetic, operands
from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.matrix_arithmetic import BF16, FP16, XF32, Format, fp8_format
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import Active
from gfx_emulator.registry import Context, Execute, add, implements

_NAME = re.compile(r"V_MFMA_(?:SCALE_)?(F32|I32)_(\d+)X(\d+)X(\d+)_(?:(\d+)B_)?(\w+)$")


@dataclass(frozen=True)
class Shape:
    """m, n and k of each of several blocks."""

    m: int
    n: int
    k: int
    blocks: int

    @property
    def kept(self) -> int:
        """Elements of A, or of B, that a lane holds."""
        return self.m * self.k * self.blocks // LANES

    @property
    def registers(self) -> int:
        """Registers of C, and of D."""
        return self.m * self.n * self.blocks // LANES


@dataclass(frozen=True)
class Elements:
    """Elements of an operand: bits in a register, how words become values, and what the model of sums needs."""

    bits: int
    values: Callable[[Array], Array]
    format: Format | None


def parse(name: str) -> tuple[str, Shape, str]:
    """(``F32`` or ``I32``, the shape, the operands' types) of an instruction's name."""
    found = _NAME.match(name)
    assert found is not None, name
    m, n, k, blocks = (int(part or 1) for part in found.group(2, 3, 4, 5))
    return found[1], Shape(m, n, k, blocks), found[6]


def gather_operand(words: Array, shape: Shape, side: int, elements: Elements) -> Array:
    """A (or B transposed): registers uint32 ``[w, 64, words]`` to values ``[w, blocks, side, k]``."""
    if elements.bits == 8 and shape.kept == 32:
        codes = np.ascontiguousarray(words).view(np.uint8)
        chunks = elements.values(codes).reshape(len(words), -1, side, 2, 16).transpose(0, 2, 3, 1, 4)
        return chunks.reshape(len(words), 1, side, shape.k)
    parts = np.ascontiguousarray(words).view(f"u{elements.bits // 8}")
    values = elements.values(parts)
    ordered = values.reshape(len(words), shape.blocks, -1, side, shape.kept).transpose(0, 1, 3, 2, 4)
    return ordered.reshape(len(words), shape.blocks, side, shape.k)


def gather_sum(registers: Array, shape: Shape) -> Array:
    """C: ``[w, registers, 64]`` to ``[w, blocks, m, n]``."""
    count = len(registers)
    if shape.m == 4:
        return registers.reshape(count, 4, 16, 4).transpose(0, 2, 1, 3)
    spread = LANES // shape.n
    parts = registers.reshape(count, shape.blocks, -1, 4, spread, shape.n)
    return parts.transpose(0, 1, 2, 4, 3, 5).reshape(count, shape.blocks, shape.m, shape.n)


def scatter_sum(matrix: Array, shape: Shape) -> Array:
    """D: ``[w, blocks, m, n]`` to ``[w, registers, 64]``."""
    count = len(matrix)
    if shape.m == 4:
        return matrix.transpose(0, 2, 1, 3).reshape(count, 4, LANES)
    spread = LANES // shape.n
    parts = matrix.reshape(count, shape.blocks, -1, spread, 4, shape.n)
    return parts.transpose(0, 1, 2, 4, 3, 5).reshape(count, shape.registers, LANES)


def _fp8(code: fp8.Encoding) -> Elements:
    return Elements(8, lambda codes: code.decode(codes).astype(np.float64), fp8_format(code.bias))


def _half(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float64)


def _xf32(bits: Array) -> Array:
    """fp32 cut to ten bits of significand."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def _operand_types(types: str, instruction: Instruction, arch: str) -> tuple[Elements, Elements]:
    """Of A and of B."""
    same = {
        "F32": Elements(32, lambda bits: bits.view(np.float32), None),
        "F16": Elements(16, _half, FP16),
        "BF16": Elements(16, lambda bits: floats.from_bf16(bits).astype(np.float64), BF16),
        "XF32": Elements(32, _xf32, XF32),
        "I8": Elements(8, lambda bits: bits.view(np.int8).astype(np.int64), None),
    }
    if types in same:
        return same[types], same[types]
    if types == "F8F6F4":
        kinds = {0: "FP8", 1: "BF8"}
        chosen = (instruction["cbsz"], instruction["blgp"])
        if any(one not in kinds for one in chosen):
            raise NotImplementedInstruction(f"{instruction}: formats {chosen} of F8F6F4 (FP8 is 0, BF8 is 1)")
        first, second = (kinds[one] for one in chosen)
    else:
        first, second = types.split("_")
    return _fp8(fp8.encoding(arch, first)), _fp8(fp8.encoding(arch, second))


def _row(active: Active, code: int, accumulation: int) -> int:
    return code - VGPR + (active.batch.accum_offset if accumulation else 0)


def _words(active: Active, code: int, accumulation: int, count: int) -> Array:
    """uint32 ``[w, 64, count]``."""
    first = _row(active, code, accumulation)
    return np.stack([active.v(first + word) for word in range(count)], axis=2)


def _build(instruction: Instruction, context: Context) -> Execute:
    kind, shape, types = parse(instruction.name)
    scaled = "_SCALE_" in instruction.name
    if types == "F8F6F4" and context.arch == "gfx942":
        raise NotImplementedInstruction(f"{instruction}: gfx942 has no such instruction")
    if types != "F8F6F4" and (instruction["cbsz"] or instruction["abid"] or instruction["blgp"]):
        raise NotImplementedInstruction(f"{instruction}: broadcast of blocks or lanes")
    first, second = _operand_types(types, instruction, context.arch)
    codes = [instruction[name] for name in ("src0", "src1", "src2")]
    in_accumulation = (instruction["acc"] & 1, instruction["acc"] >> 1 & 1, instruction["acc_cd"])
    addend = operands.constant(codes[2], "f32" if kind == "F32" else "u32", instruction)
    scales = _scale_readers(instruction) if scaled else None

    def execute(active: Active) -> None:
        # EXEC has no effect on matrix instructions.
        a, b = (
            gather_operand(_words(active, codes[i], in_accumulation[i], shape.kept * one.bits // 32), shape, side, one)
            for i, (one, side) in enumerate(((first, shape.m), (second, shape.n)))
        )
        if scales is not None:
            a, b = (_scaled(value, read(active), side) for value, read, side in zip((a, b), scales, (shape.m, shape.n)))
        dtype = np.float32 if kind == "F32" else np.int32
        if addend is None:
            registers = _words(active, codes[2], in_accumulation[2], shape.registers).transpose(0, 2, 1)
            c = gather_sum(np.ascontiguousarray(registers).view(dtype), shape)
        else:
            c = np.full((active.count, shape.blocks, shape.m, shape.n), np.uint32(addend)).view(dtype)
        d = scatter_sum(_product(a, b, c, first.format, second.format), shape)
        target = _row(active, instruction["vdst"], in_accumulation[2])
        for register in range(shape.registers):
            active.batch.vector[target + register][active.rows] = d[:, register].view(np.uint32)

    return execute


def _product(a: Array, b: Array, c: Array, format_a: Format | None, format_b: Format | None) -> Array:
    """Of every block: ``[w, blocks, m, k]`` and ``[w, blocks, n, k]`` with ``[w, blocks, m, n]``."""
    if c.dtype == np.int32:
        exact = np.einsum("wbmk,wbnk->wbmn", a, b) + c
        return exact.astype(np.int32)
    first, second, third = (value.reshape(-1, *value.shape[2:]) for value in (a, b, c))
    if format_a is None or format_b is None:
        result = matrix_arithmetic.multiply_add_32(first, second, third)
    else:
        result = matrix_arithmetic.multiply_add(first, second, third, format_a, format_b)
    return result.reshape(c.shape)


def _scale_readers(instruction: Instruction) -> list[Callable[[Active], Array]]:
    """Readers of A's and B's scales: a byte of a register per lane, which op_sel names."""

    def reader(field: str, index: int) -> Callable[[Active], Array]:
        read = operands.vector(instruction[field], "u32", instruction)
        byte = (instruction["opsel"] >> index & 1) | (instruction["opsel_hi"] >> index & 1) << 1
        shift = np.uint32(8 * byte)
        return lambda active: whole(read(active) >> shift & np.uint32(0xFF), active.count)

    return [reader("scale_src0", 0), reader("scale_src1", 1)]


def _scaled(values: Array, scales: Array, side: int) -> Array:
    """Multiply 32 consecutive k of a row by 2^(scale - 127), a lane's scale being for the elements that it holds."""
    power = scales.astype(np.float64).reshape(len(scales), -1, side).transpose(0, 2, 1)
    factor = np.where(power == 255, np.nan, np.exp2(power - 127))
    return values * np.repeat(factor, values.shape[3] // factor.shape[2], axis=2)[:, None]


add(
    [
        f"V_MFMA_F32_{m}X{m}X{k}_{types}"
        for m, k, types in (
            (32, 2, "F32"), (16, 4, "F32"), (32, 8, "F16"), (16, 16, "F16"), (32, 8, "BF16"), (16, 16, "BF16"),
            (32, 16, "F16"), (16, 32, "F16"), (32, 16, "BF16"), (16, 32, "BF16"), (32, 4, "XF32"), (16, 8, "XF32"),
            (32, 64, "F8F6F4"), (16, 128, "F8F6F4"),
            *((m, k, f"{a}_{b}") for m, k in ((32, 16), (16, 32)) for a in ("FP8", "BF8") for b in ("FP8", "BF8")),
        )
    ]
    + [f"V_MFMA_F32_{shape}_{kind}" for kind in ("F16", "BF16") for shape in ("32X32X4_2B", "16X16X4_4B", "4X4X4_16B")]
    + ["V_MFMA_F32_32X32X1_2B_F32", "V_MFMA_F32_16X16X1_4B_F32", "V_MFMA_F32_4X4X1_16B_F32"]
    + [f"V_MFMA_I32_{shape}_I8" for shape in ("32X32X16", "16X16X32", "32X32X32", "16X16X64")]
    + ["V_MFMA_SCALE_F32_32X32X64_F8F6F4", "V_MFMA_SCALE_F32_16X16X128_F8F6F4"],
    _build,
)  # fmt: skip


@implements("V_ACCVGPR_READ", "V_ACCVGPR_WRITE", "V_ACCVGPR_MOV_B32")
def _move(instruction: Instruction, context: Context) -> Execute:
    """Between ordinary and accumulation registers."""
    name, code, target = instruction.name, instruction["src0"], instruction["vdst"] - VGPR
    reads_accumulation, writes_accumulation = name != "V_ACCVGPR_WRITE", name != "V_ACCVGPR_READ"
    plain = None if reads_accumulation else operands.vector(code, "u32", instruction)

    def execute(active: Active) -> None:
        offset = active.batch.accum_offset
        value = active.v(code - VGPR + offset) if plain is None else plain(active)
        active.set_v(target + offset if writes_accumulation else target, value)

    return execute
