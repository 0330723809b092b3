# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The table of what is implemented: from a mnemonic to what builds an instruction's function.

An instruction is built once per kernel: its operands' numbers become functions that read and write them, so that
executing it decodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.registers import Active

#: Executes an instruction for the waves that stand at it.
Execute = Callable[[Active], None]


@dataclass(frozen=True)
class Context:
    """What of a kernel its instructions depend on.

    Attributes:
        arch: ``gfx942`` or ``gfx950``: FP8 instructions mean FNUZ on the first, OCP on the second.
        flush_32: fp32 instructions treat subnormal inputs as zero and give none.
        ieee: minimum and maximum quiet signaling NaN.
    """

    arch: str
    flush_32: bool = False
    ieee: bool = True


Builder = Callable[[Instruction, Context], Execute]

_BUILDERS: dict[str, Builder] = {}


def implements(*names: str) -> Callable[[Builder], Builder]:
    """Decorate what builds the instructions of these names."""

    def register(builder: Builder) -> Builder:
        add(names, builder)
        return builder

    return register


def add(names: Iterable[str], builder: Builder) -> None:
    for name in names:
        assert name not in _BUILDERS, f"{name} is implemented twice"
        _BUILDERS[name] = builder


def implemented() -> frozenset[str]:
    """The mnemonics in the table."""
    import gfx_emulator.instructions  # noqa: F401 - it fills the table

    return frozenset(_BUILDERS)


#: Formats whose instructions do the same wherever they stand, so that kernels share what executes them.
_ANYWHERE = ("VOP", "SOP1", "SOP2", "SOPC")
#: Those of these formats that read or write the program counter: what they do depends on where they stand.
_OF_PLACE = frozenset((
    "S_GETPC_B64", "S_SETPC_B64", "S_SWAPPC_B64", "S_RFE_B64", "S_CBRANCH_JOIN", "S_CBRANCH_G_FORK",
    "S_RFE_RESTORE_B64",
))  # fmt: skip
#: At most so many are kept.
_KEPT = 1 << 17
_built: dict[tuple[str, str, tuple[int, ...], Context], Execute] = {}


def build(instruction: Instruction, context: Context) -> Execute:
    """The function that executes an instruction.

    Raises:
        NotImplementedInstruction: if it has no implementation, or its form none.
    """
    if not instruction.form.startswith(_ANYWHERE) or instruction.name in _OF_PLACE:
        return _builder(instruction)(instruction, context)
    key = (instruction.name, instruction.form, tuple(instruction.fields.values()), context)
    found = _built.get(key)
    if found is None:
        if len(_built) >= _KEPT:
            _built.clear()
        found = _built[key] = _builder(instruction)(instruction, context)
    return found


def _builder(instruction: Instruction) -> Builder:
    builder = _BUILDERS.get(instruction.name)
    if builder is None and instruction.name in implemented():
        builder = _BUILDERS[instruction.name]
    if builder is None:
        raise NotImplementedInstruction(f"{instruction.name} is not implemented ({instruction})")
    return builder
