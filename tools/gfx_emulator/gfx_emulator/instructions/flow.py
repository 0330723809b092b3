# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Branches, the end of a program, barriers, and instructions that do nothing here.

What changes the order of execution says so in `Active.signal`; the machine acts on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.registers import EXEC, VCC, Active, Barrier, End, Jump, Yield
from gfx_emulator.registry import Context, Execute, add, implements

#: What has no effect in this execution, and why.
NO_EFFECT = {
    "S_NOP": "it only spends cycles",
    "S_WAITCNT": "memory instructions are complete when they were executed, in program order",
    "S_SETPRIO": "the order of waves is the machine's",
    "S_SETHALT": "there is no debugger; the value 0 is the only one compilers write",
    "S_ICACHE_INV": "there is no instruction cache",
    "S_DCACHE_INV": "there is no scalar cache",
    "S_DCACHE_WB": "there is no scalar cache",
    "BUFFER_WBL2": "there are no caches: memory is coherent",
    "BUFFER_INV": "there are no caches: memory is coherent",
    "S_INCPERFLEVEL": "it counts for a profiler",
    "S_DECPERFLEVEL": "it counts for a profiler",
    "S_TTRACEDATA": "it tells a profiler",
    "V_NOP": "it only spends cycles",
    "DS_NOP": "it only spends cycles",
}


def _nothing(instruction: Instruction, context: Context) -> Execute:
    return lambda active: None


add(NO_EFFECT, _nothing)

_CONDITIONS: dict[str, Callable[[Active], Array]] = {
    "SCC0": lambda active: ~active.scc(),
    "SCC1": lambda active: active.scc(),
    "VCCZ": lambda active: active.s64(VCC) == 0,
    "VCCNZ": lambda active: active.s64(VCC) != 0,
    "EXECZ": lambda active: active.s64(EXEC) == 0,
    "EXECNZ": lambda active: active.s64(EXEC) != 0,
}


def _always(active: Active) -> Array:
    return np.ones(active.count, np.bool_)


def _target(instruction: Instruction) -> int:
    """The offset that a branch goes to: words from the next instruction."""
    words = (instruction["simm16"] ^ 0x8000) - 0x8000
    return instruction.offset + 4 + 4 * words


@implements("S_BRANCH", *(f"S_CBRANCH_{name}" for name in _CONDITIONS))
def _branch(instruction: Instruction, context: Context) -> Execute:
    target = _target(instruction)
    name = instruction.name.removeprefix("S_CBRANCH_")
    condition = _CONDITIONS.get(name, _always)

    def execute(active: Active) -> None:
        active.signal = Jump(target, condition(active))

    return execute


@implements("S_ENDPGM")
def _end(instruction: Instruction, context: Context) -> Execute:
    def execute(active: Active) -> None:
        active.signal = End()

    return execute


@implements("S_BARRIER")
def _barrier(instruction: Instruction, context: Context) -> Execute:
    def execute(active: Active) -> None:
        active.signal = Barrier()

    return execute


@implements("S_SLEEP")
def _sleep(instruction: Instruction, context: Context) -> Execute:
    """Lets other waves run: what sleeps usually waits for them."""

    def execute(active: Active) -> None:
        active.signal = Yield()

    return execute


#: What may set `Active.signal`.
SIGNALS = frozenset({"S_BRANCH", "S_ENDPGM", "S_BARRIER", "S_SLEEP", *(f"S_CBRANCH_{name}" for name in _CONDITIONS)})
