# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands and results of vector instructions in each of their encodings.

`sources` and `Target` give an instruction's arithmetic the same view of VOP1, VOP2, VOPC and VOP3, of the sub-dword
forms (SDWA) and of those that read neighbouring lanes (DPP): values in, values out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gfx_emulator import operands
from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.operands import VGPR, Reader
from gfx_emulator.registers import Active

#: Which lanes an instruction writes, bool ``[n, 64]``; None: those of EXEC.
LaneMask = Callable[[Active], Array]

_DTYPES = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip


def source_codes(instruction: Instruction) -> list[int]:
    """Numbers of the operands that the encoding has, in the manual's order."""
    fields = instruction.fields
    if "vsrc0" in fields:
        codes = [_sub_dword(fields["vsrc0"], instruction.get("s0"))]
        if "vsrc1" in fields:
            codes.append(_sub_dword(fields["vsrc1"], instruction.get("s1")))
        return codes
    return [fields[name] for name in ("src0", "vsrc1", "src1", "src2") if name in fields]


def _sub_dword(code: int, scalar: int) -> int:
    """SDWA's operands are vector registers unless a bit says that they are scalar."""
    return code - VGPR if scalar else code


def source(instruction: Instruction, index: int, code: int, kind: str) -> Reader:
    """A reader of an operand's values, with the encoding's modifiers.

    Args:
        index: which operand it is, 0 to 2.
        kind: ``f32``, ``u16``, ...: what the instruction takes it for.
    """
    form, fields = instruction.form, instruction.fields
    read = operands.vector(code, kind, instruction)
    negative = absolute = False
    if form.endswith("_DPP16"):
        if index == 0:
            read = _neighbour(read, fields)
        negative, absolute = bool(fields.get(f"src{index}_neg", 0)), bool(fields.get(f"src{index}_abs", 0))
    elif "SDWA" in form:
        read = _selected(read, fields[f"src{index}_sel"], bool(fields[f"src{index}_sext"]))
        negative, absolute = bool(fields.get(f"src{index}_neg", 0)), bool(fields.get(f"src{index}_abs", 0))
    elif form.startswith("VOP3") and form not in ("VOP3P", "VOP3P_MFMA"):
        negative, absolute = bool(fields["neg"] >> index & 1), bool(instruction.get("abs") >> index & 1)
        if kind.endswith("16") and instruction.get("opsel") >> index & 1:
            upper = read
            read = lambda active: upper(active) >> np.uint32(16)  # noqa: E731
    return _modified(_typed(read, kind), kind, negative, absolute)


def _typed(read: Reader, kind: str) -> Reader:
    dtype = _DTYPES[kind]
    if kind.endswith("16"):
        return lambda active: read(active).astype(np.uint16).view(dtype)
    if kind[0] == "u":
        return read
    return lambda active: read(active).view(dtype)


def _modified(read: Reader, kind: str, negative: bool, absolute: bool) -> Reader:
    if not negative and not absolute:
        return read
    if kind[0] != "f":
        raise NotImplementedInstruction(f"negation or absolute value of an operand of type {kind}")
    if absolute and negative:
        return lambda active: -np.abs(read(active))
    return (lambda active: np.abs(read(active))) if absolute else (lambda active: -read(active))


def _selected(read: Reader, selection: int, signed: bool) -> Reader:
    """SDWA: a byte (0 to 3), a word (4, 5) or all of an operand, extended to 32 bits."""
    if selection == 6:
        return read
    shift, width = (8 * selection, 8) if selection < 4 else (16 * (selection - 4), 16)
    mask, sign = np.uint32((1 << width) - 1), np.uint32(1 << (width - 1))

    def part(active: Active) -> Array:
        value = read(active) >> np.uint32(shift) & mask
        return (value ^ sign) - sign if signed else value

    return part


def lane_pattern(control: int) -> tuple[Array, Array]:
    """DPP: (the lane that each lane reads, whether there is such a lane)."""
    lane = np.arange(LANES)
    row, place = lane & ~15, lane & 15
    valid = np.ones(LANES, np.bool_)
    if control <= 0xFF:
        choice = np.array([control >> 2 * i & 3 for i in range(4)])
        return (lane & ~3) + choice[lane & 3], valid
    kind, amount = control & ~15, control & 15
    if kind == 0x100 and amount:
        return row + np.minimum(place + amount, 15), place + amount < 16
    if kind == 0x110 and amount:
        return row + np.maximum(place - amount, 0), place >= amount
    if kind == 0x120 and amount:
        return row + (place - amount) % 16, valid
    whole = {
        0x130: (np.minimum(lane + 1, 63), lane < 63),
        0x134: ((lane + 1) % 64, valid),
        0x138: (np.maximum(lane - 1, 0), lane > 0),
        0x13C: ((lane - 1) % 64, valid),
        0x140: (row + 15 - place, valid),
        0x141: ((lane & ~7) + 7 - (lane & 7), valid),
        0x142: (np.maximum(row - 1, 0), lane >= 16),
        0x143: (np.full(LANES, 31), lane >= 32),
    }
    if control in whole:
        return whole[control]
    if kind == 0x150:
        return row + amount, valid
    raise NotImplementedInstruction(f"DPP control {control:#x}")


def _neighbour(read: Reader, fields: dict[str, int]) -> Reader:
    """DPP: another lane's value; zero where that lane does not exist or is inactive (which matters with bound_ctrl
    alone: without it those lanes are not written)."""
    lanes, valid = lane_pattern(fields["dpp"])

    def other(active: Active) -> Array:
        value = whole(read(active), active.count)[:, lanes]
        if active.mask is None and valid.all():
            return value
        return np.where(valid & active.active_lanes()[:, lanes], value, np.uint32(0))

    return other


def written_lanes(instruction: Instruction) -> LaneMask | None:
    """The lanes that a form with DPP writes; None where it is EXEC's."""
    if not instruction.form.endswith("_DPP16"):
        return None
    fields = instruction.fields
    lanes, valid = lane_pattern(fields["dpp"])
    lane = np.arange(LANES)
    enabled = (fields["row_mask"] >> (lane >> 4) & 1 == 1) & (fields["bank_mask"] >> (lane >> 2 & 3) & 1 == 1)
    bounded = bool(fields["bc"])

    def mask(active: Active) -> Array:
        own = active.active_lanes()
        return own & enabled if bounded else own & enabled & valid & own[:, lanes]

    return mask


class Target:
    """Where and how the result of a vector instruction is written.

    Args:
        kind: the result's type.
        keep_upper: whether a 16-bit result keeps the register's other half, rather than zeroing it.
        clamps: whether the instruction itself sees to clamping.
    """

    def __init__(self, instruction: Instruction, kind: str, keep_upper: bool = False, clamps: bool = False) -> None:
        self.number = instruction["vdst"] - VGPR
        self.kind, self.wide = kind, kind.endswith("64")
        self.lanes = written_lanes(instruction)
        self._shape_result = _result(instruction, kind, keep_upper)
        self._scale = {0: 1.0, 1: 2.0, 2: 4.0, 3: 0.5}[instruction.get("omod")]
        self._clamp = bool(instruction.get("clmp")) and not clamps
        if (self._clamp or self._scale != 1.0) and kind[0] != "f":
            raise NotImplementedInstruction(f"{instruction}: clamping or scaling a result of type {kind}")

    def write(self, active: Active, value: Array) -> None:
        """Write values of the result's type, ``[n, 64]`` or what broadcasts to it."""
        if self._scale != 1.0:
            value = value * value.dtype.type(self._scale)
        if self._clamp:
            # DX10_CLAMP, which is always on: NaN become zero.
            value = np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)
        mask = None if self.lanes is None else self.lanes(active)
        if self.wide:
            words = whole(value, active.count).view(np.uint64)
            active.set_v64(self.number, words, mask)
            return
        narrow = value.view(np.uint16).astype(np.uint32) if self.kind.endswith("16") else value.view(np.uint32)
        if self._shape_result is not None:
            narrow = self._shape_result(active.v(self.number), narrow)
        active.set_v(self.number, narrow, mask)


def _result(instruction: Instruction, kind: str, keep_upper: bool) -> Callable[[Array, Array], Array] | None:
    """How a result is combined with what the register held; None where it replaces it."""
    upper, lower = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
    if "SDWA" in instruction.form and "dst_sel" in instruction.fields and instruction["dst_sel"] != 6:
        return _sdwa_result(instruction["dst_sel"], instruction["dst_unused"])
    if kind.endswith("16") and instruction.get("opsel") & 8 and instruction.form.startswith("VOP3"):
        return lambda old, value: old & lower | value << np.uint32(16)
    if kind.endswith("16") and keep_upper:
        return lambda old, value: old & upper | value
    return None


def _sdwa_result(selection: int, unused: int) -> Callable[[Array, Array], Array]:
    shift, width = (8 * selection, 8) if selection < 4 else (16 * (selection - 4), 16)
    mask = (1 << width) - 1
    if unused not in (0, 1, 2):
        raise NotImplementedInstruction(f"SDWA dst_unused {unused}")

    def combine(old: Array, value: Array) -> Array:
        part = (value & np.uint32(mask)) << np.uint32(shift)
        if unused == 2:
            return old & np.uint32(~(mask << shift) & 0xFFFFFFFF) | part
        if unused == 1:
            signed = np.left_shift(part, np.uint32(32 - shift - width)).view(np.int32) >> np.int32(32 - shift - width)
            return signed.view(np.uint32)
        return part

    return combine


def sources(instruction: Instruction, kinds: Sequence[str]) -> list[Reader]:
    """Readers of an instruction's operands, whose types are given in the manual's order."""
    codes = source_codes(instruction)
    if len(codes) < len(kinds):
        raise NotImplementedInstruction(f"{instruction}: {len(codes)} operands, {len(kinds)} expected")
    return [source(instruction, index, codes[index], kind) for index, kind in enumerate(kinds)]
