# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""32-bit numbers that a compiler mixes up, read in PTX.

The LLVM of Triton 3.6 shifts two numbers of a thread as one vector, each by a constant of its own. Where only one
result is used it makes a 64-bit word of both and takes the upper half, but widens the other number before it shifts it:
what the shift should push out at the top of 32 bits gets into the number that is used.

    mul.wide.u32  %rd1, %r1, 268435456;   // the other number, shifted by 28: more than 32 bits
    shl.b64       %rd2, %rd3, 34;         // the one that is used, shifted by 2, in the upper half
    or.b64        %rd4, %rd1, %rd2;
    mov.b64       {_, %r2}, %rd4;

Such a kernel addresses other elements than it should. It was found in `kernels.norm_casts`, where rows are four apart
and columns four to a thread (`kernels.tile.fours`): in threads from 128 on the third column was the fourth. Where
the bits are masked later, as in a form of `norm_cast`, they do no harm, and nothing is reported. Triton 3.5 and 3.7 to
3.9 compile the same source as they should.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HIGH_SHIFT = re.compile(r"shl\.b64\s+%rd\d+, %rd\d+, (?:3[2-9]|[45]\d|6[0-3]);")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([\w.]+)\s+(.*?);", re.MULTILINE)
_REGISTER = re.compile(r"%\w+(?:\.x)?")
_THREADS = re.compile(r"\.reqntid (\d+)")
#: PTX ISA, "Special Registers: %tid": no block has more.
_MOST_THREADS = 1024


class _Line(NamedTuple):
    operation: str
    arguments: tuple[str, ...]
    text: str


class _Code:
    """Instructions by the register that they write and by those that they read."""

    def __init__(self, ptx: str) -> None:
        threads = _THREADS.search(ptx)
        self._thread_bits = ((int(threads[1]) if threads else _MOST_THREADS) - 1).bit_length()
        self.made: dict[str, _Line] = {}
        self._uses: dict[str, list[_Line]] = {}
        for found in _INSTRUCTION.finditer(ptx):
            arguments = tuple(part.strip() for part in found[2].split(","))
            line = _Line(found[1], arguments, " ".join(found[0].split())[:-1])
            # What takes a 64-bit word apart writes two registers: {_, %r1}.
            written = arguments[1].rstrip("}") if arguments[0] == "{_" else arguments[0]
            self.made.setdefault(written, line)
            for register in _REGISTER.findall(found[2].partition(written)[2]):
                self._uses.setdefault(register, []).append(line)

    def uses(self, register: str) -> list[_Line]:
        return self._uses.get(register, [])

    def width(self, register: str) -> int:
        """How many bits a 32-bit register may have set, from below."""
        if register == "%tid.x":
            return self._thread_bits
        line = self.made.get(register)
        if line is None:
            return 32
        operation, last = line.operation, line.arguments[-1]
        if operation == "mov.u32":
            return self.width(line.arguments[1])
        if last.isdigit():
            if operation == "and.b32":
                return min(int(last).bit_length(), self.width(line.arguments[1]))
            if operation == "shr.u32":
                return max(self.width(line.arguments[1]) - int(last), 0)
            if operation == "bfe.u32":
                return int(last)
        return 32

    def beyond(self, line: _Line) -> int:
        """Bits above the 32nd that a 32-bit number may have, widened and shifted up; 0 for any other instruction."""
        if line.operation == "mul.wide.u32" and line.arguments[2].isdigit():
            shift, number = int(line.arguments[2]).bit_length() - 1, line.arguments[1]
        elif line.operation == "shl.b64" and line.arguments[2].isdigit():
            widened = self.made.get(line.arguments[1])
            if widened is None or widened.operation != "cvt.u64.u32":
                return 0
            shift, number = int(line.arguments[2]), widened.arguments[1]
        else:
            return 0
        return max(self.width(number) + shift - 32, 0)


def mixed(ptx: str) -> str | None:
    """The instructions that mix two numbers up; None where there are none, as in every right kernel."""
    if _HIGH_SHIFT.search(ptx) is None:
        return None
    code = _Code(ptx)
    for register, word in code.made.items():
        uses = code.uses(register)
        if word.operation != "or.b64" or not uses or not all(map(_takes_upper_half, uses)):
            continue
        halves = [code.made.get(argument) for argument in word.arguments[1:]]
        for low, high in (halves, halves[::-1]):
            if low and high and _is_upper_half(high):
                bits = code.beyond(low)
                taken = [code.uses(_written(line)) for line in uses]
                if bits and not all(_drops(bits, line) for lines in taken for line in lines):
                    return "; ".join((low.text, high.text, word.text, uses[0].text))
    return None


def _takes_upper_half(line: _Line) -> bool:
    if line.operation == "shr.u64":
        return line.arguments[2] == "32"
    return line.operation == "mov.b64" and line.arguments[0] == "{_"


def _written(line: _Line) -> str:
    return line.arguments[1].rstrip("}") if line.operation == "mov.b64" else line.arguments[0]


def _is_upper_half(line: _Line) -> bool:
    return line.operation == "shl.b64" and line.arguments[2].isdigit() and int(line.arguments[2]) >= 32


def _drops(bits: int, line: _Line) -> bool:
    """Whether an instruction masks the lowest bits of what it reads."""
    last = line.arguments[-1]
    return line.operation in ("and.b32", "and.b64") and last.isdigit() and int(last) % (1 << bits) == 0
