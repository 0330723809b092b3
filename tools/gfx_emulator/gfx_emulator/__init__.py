# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Executes AMDGPU code objects for gfx942 and gfx950 on the CPU.

`load` reads a code object, `Memory` holds what its kernels may access, `launch` runs one.
"""

from gfx_emulator.code_object import Kernel, load
from gfx_emulator.errors import (
    AccessError,
    CodeObjectError,
    EmulatorError,
    HangError,
    NotImplementedInstruction,
    RaceError,
)
from gfx_emulator.machine import Limits, launch
from gfx_emulator.memory import Memory

__all__ = [
    "AccessError",
    "CodeObjectError",
    "EmulatorError",
    "HangError",
    "Kernel",
    "Limits",
    "Memory",
    "NotImplementedInstruction",
    "RaceError",
    "launch",
    "load",
]
