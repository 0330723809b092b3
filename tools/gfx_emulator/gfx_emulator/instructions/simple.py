# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Vector instructions that are a function of their operands: one line of a table each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.registers import Active
from gfx_emulator.registry import Builder, Context, Execute, add
from gfx_emulator.vector_forms import Target, sources

Function = Callable[..., Any]
#: (type of the result, types of the operands, the function).
Row = tuple[str, tuple[str, ...], Function]


def simple(result: str, kinds: tuple[str, ...], function: Function, keep_upper: bool = False) -> Builder:
    """A builder of an integer instruction, or of one of floats whose NaN the function takes care of."""

    def build(instruction: Instruction, context: Context) -> Execute:
        reads, target = sources(instruction, kinds), Target(instruction, result, keep_upper)

        def execute(active: Active) -> None:
            target.write(active, function(*[read(active) for read in reads]))

        return execute

    return build


def arithmetic(result: str, kinds: tuple[str, ...], function: Function, keep_upper: bool = False) -> Builder:
    """A builder of an instruction on floats: subnormals as MODE has it, NaN as the chips give them.

    Functions of fp16 operands get them as float32, which holds them exactly, and may give float32 or float64: the
    result is rounded to fp16 once more, which is harmless after one operation of that precision.
    """

    def build(instruction: Instruction, context: Context) -> Execute:
        reads, target = sources(instruction, kinds), Target(instruction, result, keep_upper)
        flush = context.flush_32 and result == "f32"

        def execute(active: Active) -> None:
            values = [read(active) for read in reads]
            target.write(active, computed(function, values, result, flush))

        return execute

    return build


def computed(function: Function, values: list[Array], result: str, flush: bool) -> Array:
    """A function of floats with the chips' subnormals and NaN: of type `result`."""
    if result == "f16":
        wide = [value.astype(np.float32) if value.dtype == np.float16 else value for value in values]
        given = np.asarray(function(*wide))
        if given.dtype == np.float32:
            given = floats.with_nans(given, [value for value in wide if value.dtype == np.float32])
        return floats.half(given).view(np.float16)
    if flush:
        values = [floats.flushed(value) if value.dtype == np.float32 else value for value in values]
    given = floats.with_nans(np.asarray(function(*values)), values)
    return floats.flushed(given) if flush else given


def fill(rows: Mapping[str, Row], builder: Callable[[str, tuple[str, ...], Function], Builder]) -> None:
    """Put a table's instructions in the registry."""
    for name, (result, kinds, function) in rows.items():
        add([name], builder(result, kinds, function))
