# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Binaries that are known to compute something else than their kernel says, told by what the compiler wrote.

Two defects of compilers are known: numbers that are mixed up (`lanes`, PTX of Triton 3.6), and products that are made
in fp16 (`in_half`, all releases of Triton up to 3.9):

    %3 = fpext bfloat %1 to float         ; both factors are bf16, the product is exact in fp32
    %4 = fpext bfloat %2 to float
    %5 = fmul float %3, %4
    %6 = fptrunc float %5 to half

LLVM's instcombine makes one multiplication in fp16 of it, of factors that it converts first: it compares the bits of
significands (8 and 11) and forgets those of exponents. A bf16 number beyond 65,504 becomes Inf, one below 2^-14 loses
bits, before it is multiplied. It does so with sums, differences and quotients too. Kernels avoid it by
`kernels.codes.widen`, in which LLVM sees no `fpext`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from te_dispatch_triton import lanes

_ASSIGNED = re.compile(r"^\s*(%[\w.]+) = (\w+) (.*)$", re.MULTILINE)
_VALUE = re.compile(r"%[\w.]+")
_HALF = r"(?:<\d+ x half>|half)"
_ARITHMETIC = re.compile(rf"= f(?:add|sub|mul|div|rem) (?:[a-z]+ )*{_HALF} ")
_FROM_BFLOAT = re.compile(r"(?:<\d+ x bfloat>|bfloat) .* to ")
_TO_HALF = re.compile(rf" to {_HALF}(?!\w)")
_MOVES = ("shufflevector", "insertelement", "extractelement")


def found(assembly: Mapping[str, Any]) -> str | None:
    """What is wrong with a compiled kernel; None for nothing that is known.

    Args:
        assembly: `asm` of what `triton.compile` returns.
    """
    mixed = lanes.mixed(assembly.get("ptx", ""))
    if mixed is not None:
        return f"two numbers are mixed up: {mixed}"
    halves = in_half(assembly.get("llir", ""))
    return None if halves is None else f"bf16 numbers are converted to fp16 before arithmetic: {halves}"


def in_half(llir: str) -> str | None:
    """The first instruction of LLVM IR that computes in fp16 with a number that was bf16; None where there is none."""
    if _ARITHMETIC.search(llir) is None:
        return None
    widened: set[str] = set()
    narrowed: set[str] = set()
    for line in _ASSIGNED.finditer(llir):
        result, operation, rest = line.groups()
        read = _VALUE.findall(rest)
        if operation == "fpext" and _FROM_BFLOAT.match(rest):
            widened.add(result)
        elif operation == "fptrunc" and _TO_HALF.search(rest) and read[0] in widened:
            narrowed.add(result)
        elif operation in _MOVES:
            for values in (widened, narrowed):
                if not values.isdisjoint(read):
                    values.add(result)
        elif not narrowed.isdisjoint(read) and _ARITHMETIC.search(line[0]):
            return line[0].partition(", !")[0].strip()
    return None
