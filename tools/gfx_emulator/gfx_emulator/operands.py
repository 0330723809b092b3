# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands: from their numbers in an instruction to functions that read them for the active waves.

A scalar reader gives ``[n]`` or a number's array without axes, a vector reader what broadcasts to ``[n, 64]``; both
give bits, as uint32 or uint64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.registers import EXEC, VCC, Active

Reader = Callable[[Active], Array]

VGPR = 256
_VCCZ, _EXECZ, _SCC, _LITERAL = 251, 252, 253, 255
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
#: 1 / (2 pi), as the manuals give it for 16, 32 and 64 bits.
_INVERSE_2PI = {16: 0x3118, 32: 0x3E22F983, 64: 0x3FC45F306DC9C882}
_PACKINGS = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}


def constant(code: int, kind: str, instruction: Instruction) -> int | None:
    """The bits of an inline constant or literal for a type like ``f32`` or ``u64``; None for a register.

    16-bit types have their bits in the low half.
    """
    bits = int(kind[1:])
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & ((1 << max(bits, 32)) - 1)
    if code in _FLOATS:
        pack, unpack = _PACKINGS[bits]
        return int(struct.unpack(unpack, struct.pack(pack, _FLOATS[code]))[0])
    if code == 248:
        return _INVERSE_2PI[bits]
    if code == _LITERAL:
        literal = instruction["literal"]
        if bits == 64:
            # Of a double the literal is the upper half; integers are extended by their kind.
            return (
                literal << 32
                if kind == "f64"
                else (literal - ((literal >> 31) << 32)) & (2**64 - 1)
                if kind == "i64"
                else literal
            )
        return literal
    return None


def scalar(code: int, kind: str, instruction: Instruction) -> Reader:
    """A reader of a scalar operand: uint32, or uint64 for 64-bit types."""
    wide = kind.endswith("64")
    value = constant(code, kind, instruction)
    if value is not None:
        held = np.asarray(value, np.uint64 if wide else np.uint32)
        return lambda active: held
    if code < 128:
        return (lambda active: active.s64(code)) if wide else (lambda active: active.s(code))
    if code in (_VCCZ, _EXECZ):
        pair = VCC if code == _VCCZ else EXEC
        return lambda active: (active.s64(pair) == 0).astype(np.uint64 if wide else np.uint32)
    if code == _SCC:
        return lambda active: active.scc().astype(np.uint64 if wide else np.uint32)
    raise NotImplementedInstruction(f"{instruction}: operand {code} is not emulated")


def vector(code: int, kind: str, instruction: Instruction) -> Reader:
    """A reader of an operand of a vector instruction."""
    if code >= VGPR:
        number = code - VGPR
        return (lambda active: active.v64(number)) if kind.endswith("64") else (lambda active: active.v(number))
    read = scalar(code, kind, instruction)
    if constant(code, kind, instruction) is not None:
        return read
    return lambda active: read(active)[:, None]
