# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What an assembly says of a kernel: registers, spills, shared memory, matrix instructions.

NVIDIA's numbers come from the binary, by the ``cuobjdump`` that Triton brings: PTX knows no registers. AMD's stand in
the kernel's metadata (LLVM, "User Guide for AMDGPU Backend", "Code Object V5 Metadata").
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

from triton import knobs

_CUDA = re.compile(r"REG:(\d+) STACK:(\d+)")
#: PTX ISA: Hopper's, Blackwell's and everybody's matrix instructions, up to the types of their operands.
_PTX = (
    (re.compile(r"wgmma\.mma_async\.[\w.]*?\.m64n\d+k\d+\.(\w+\.\w+\.\w+)"), "wgmma "),
    (re.compile(r"tcgen05\.mma[\w.:]*?kind::(\w+)"), "tcgen05 "),
    (re.compile(r"\bmma\.sync\.aligned\.m\d+n\d+k\d+\.row\.col\.(?:kind::\w+\.)?([\w.]+)\b"), "mma "),
)
_AMD = re.compile(r"\b(v_(?:s?mfmac?|wmma)\w*)")


class Facts(NamedTuple):
    """Attributes:
    registers: per thread; AMD's vector registers, accumulation ones included.
    spills: bytes of stack per thread on NVIDIA; vector registers that go to memory on AMD, where scalar ones go to
        lanes of vector registers.
    shared: bytes of shared memory per program.
    instructions: matrix instructions, sorted.
    """

    registers: int
    spills: int
    shared: int
    instructions: tuple[str, ...]


def facts_of(compiled: Any) -> Facts:
    """Of what `triton.compile` returned."""
    if "ptx" in compiled.asm:
        registers, spills = _cuda_resources(compiled.asm["cubin"])
        instructions = nvidia_instructions(compiled.asm["ptx"])
    else:
        text = compiled.asm["amdgcn"]
        registers, spills = amd_resources(text)
        instructions = amd_instructions(text)
    return Facts(registers, spills, int(compiled.metadata.shared), instructions)


def nvidia_instructions(ptx: str) -> tuple[str, ...]:
    """Matrix instructions of PTX with the types of their operands: ``wgmma f32.e4m3.e4m3``."""
    return tuple(sorted({f"{name}{found}" for pattern, name in _PTX for found in pattern.findall(ptx)}))


def amd_instructions(text: str) -> tuple[str, ...]:
    """Matrix instructions of AMD's assembly: ``v_mfma_f32_32x32x16_fp8_fp8``."""
    return tuple(sorted(set(_AMD.findall(text))))


def amd_resources(text: str) -> tuple[int, int]:
    """(vector registers, those spilled)."""
    found = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
    return found["vgpr_count"] + found.get("agpr_count", 0), found.get("vgpr_spill_count", 0)


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack, which hold what was spilled)."""
    handle, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    finally:
        os.unlink(path)
    rows = [(int(registers), int(stack)) for registers, stack in _CUDA.findall(told)]
    if not rows:
        raise RuntimeError(f"cuobjdump tells no resources: {told!r}")
    return max(rows)
